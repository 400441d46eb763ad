"""Every message between head and worker, the protocol's version and its limits. The rest of a message are its arrays.

The head numbers the orders it gives to a worker: 1, 2, 3, ... A worker carries them out one after the other, and
answers each exactly once. Either side repeats what may have been lost: an order until the worker says it received it,
an answer until the head says it accepted it. A number that was seen before is ignored.

Messages larger than CHUNK_BYTES, of either side and of any kind, travel in chunks. Chunks between the head and one
process of a worker are numbered in each direction: 0, 1, 2, ..., whatever message they belong to, and are received in
this order. At most a window of them is under way, so that small messages need not wait long behind large ones. Chunks
are lost only when a connection dies: the sender goes on where the receiver says it is, and repeats nothing on a
connection that is slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from envfleet.cluster.info_choice import NUMBERS, InfoChoice
from envfleet.cluster.sync import SyncRule
from envfleet.cluster.timing import Timing
from envfleet.contract.live_changes import ChangeKind
from envfleet.contract.pool_config import PoolConfig
from envfleet.contract.spec import EnvSpec

PROTOCOL_VERSION = 7
PROCESS_NAME_BYTES = 16  # the random name that a worker's process gives itself: the first frame of its messages
CHUNK_BYTES = 256 << 10  # larger messages travel in chunks of this size
MOST_FRAME_BYTES = CHUNK_BYTES + (32 << 10)  # that a socket takes: a chunk and its header
MOST_HOST_CHARS = 255  # a name in the DNS has no more

if TYPE_CHECKING:
    Unread = Any
else:
    Unread = msgspec.Raw  # any value: it stays bytes until bounded_msgpack has looked at it


def is_host_name(host: str) -> bool:
    """Whether it may stand in logs and errors, and on a terminal."""
    return 1 <= len(host) <= MOST_HOST_CHARS and host.isascii() and host.isprintable()


class Limits(msgspec.Struct, frozen=True):
    """What one message may be at most, with all its chunks. A receiver drops a larger one before it allocates for it.

    A socket takes frames of MOST_FRAME_BYTES, 288 KiB: ZeroMQ closes a connection that claims to send a larger one.
    Until a connection has proved that it has the run's key it may cost one such frame, for 3 s; there are at most 64
    of them, and one more for each worker; the others are closed.
    """

    header_bytes: int = 512 << 20
    num_arrays: int = 4096
    num_dims: int = 16
    frame_bytes: int = 4 << 30
    total_bytes: int = 8 << 30


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of one worker: what the user said about the envs and the pool, as it was said."""

    env: EnvSpec | None  # kwargs: a list with those of each env, as plain_values has it; None: pickled, in array `env`
    pool: PoolConfig
    first_env_id: int = 0  # of this worker's envs in the whole run
    seed: int | None = None  # env i of the whole run is seeded with `seed + i` if its first reset brings no seed
    native_file: str | None = None  # the header or library that has the native env `env.id`: to be loaded first


class EnvFailure(msgspec.Struct, frozen=True):
    """An env that raised, or whose process died, in the course of an order that was carried out all the same."""

    kind: str  # the name of the exception
    env_id: int  # in the whole run
    error: str
    traceback: str
    seed: int | None
    last_action: Unread  # as values_wire has it


# Limits that are checked before anything is allocated; cluster/wire/info_arrays.py checks the rest.
InfoPath = Annotated[list[Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=32)]
InfoPaths = Annotated[list[InfoPath], msgspec.Meta(max_length=256)]
LeftOut = Annotated[list[Annotated[str, msgspec.Meta(max_length=2048)]], msgspec.Meta(max_length=256)]


class RolloutInfos(msgspec.Struct, frozen=True, kw_only=True):
    """The infos in a rollout. Columns are arrays: `info.<i>` and `info_mask.<i>`, and `final_info...` of last steps.

    Without a mask all rows have the key; without the array it is a dictionary, whose parts are columns of their own.
    """

    steps: InfoPaths = []  # the key of each column; the keys that lead to it, if it is inside a dictionary
    finals: InfoPaths = []  # the same, of the last steps of episodes
    objects: Unread = msgspec.Raw(b"\x80")  # "info", "final_info": lists of keys, places, values as values_wire has it
    left_out: LeftOut = []  # keys, and why, for people


# -- both --


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """The next bytes of a message that is too large to be sent at once. They are in the arrays, one after the other."""

    number: int
    attempt: int  # how often the sender has gone back before it sent this chunk
    frame_bytes: list[int] | None = None  # in the first chunk of a message: the sizes of its frames
    digest: bytes = b""  # in the last one, over tcp: blake2b of all its bytes


class ChunksReceived(msgspec.Struct, frozen=True, tag="chunks_received"):
    """Chunks before `next_number` came, and that one is to come next."""

    next_number: int
    lost_attempt: int = -1  # a later chunk of this attempt came: go back to `next_number`
    is_damaged: bool = False  # the message of that attempt does not have its hash: `next_number` is its first chunk
    probe: int = 0  # the number of the probe that this answers; 0: of none


class ChunkProbe(msgspec.Struct, frozen=True, tag="chunk_probe"):
    """Which chunk do you expect? It travels behind those that were sent before it: what is missing then is lost."""

    number: int


AboutChunks = Chunk | ChunksReceived | ChunkProbe


# -- worker -> head --


class Join(msgspec.Struct, frozen=True, tag="join"):
    """May I take part? The first message of a worker's process."""

    protocol: int
    worker: int
    host: str
    pid: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """My pool is built. Bounds of Box spaces are in the arrays."""

    observation_space: Unread  # as spaces_wire has it
    action_space: Unread
    metadata: Unread  # as values_wire has it
    why_no_changes: str | None = None  # the envs cannot be changed while they run: the error for those who try


class NotReady(msgspec.Struct, frozen=True, tag="not_ready"):
    """My pool cannot be built."""

    error: str
    traceback: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """I am here. `received`: the last order that came."""

    received: int
    resent_bytes: int = 0  # that I have sent more than once, since I began


class RowsReady(msgspec.Struct, frozen=True, tag="rows_ready"):
    """Answer to Reset and Step: a row for each env, in the arrays."""

    order: int
    info: Unread  # as values_wire has it
    failures: list[EnvFailure] = []
    is_after_loss: bool = False  # the order was for another process, now lost; its episodes are cut short


class RolloutReady(msgspec.Struct, frozen=True, tag="rollout_ready"):
    """Answer to Collect: the rollout is in the arrays, with what the policy shows of itself on the probed rows.

    The arrays of the envs that were ready first say which they are (`env_ids`), and the version of each (`versions`).
    """

    order: int
    version: int  # of the newest rows
    seconds: float  # from the order's start to its end
    distribution: str | None = None  # its kind, if the policy shows it
    failures: list[EnvFailure] = []
    infos: RolloutInfos = RolloutInfos()


class ValuesReady(msgspec.Struct, frozen=True, tag="values_ready"):
    """Answer to Call, SetAttr and ChangeEnvs: a value for each env; nil if there is none."""

    order: int
    values: Unread  # as values_wire has it, a list


class EvaluationReady(msgspec.Struct, frozen=True, tag="evaluation_ready"):
    """Answer to Evaluate: returns, lengths, ends and frames of the episodes are in the arrays."""

    order: int
    infos: Unread  # of the last step of each episode: a list of dictionaries, as values_wire has it


class EvaluationProgress(msgspec.Struct, frozen=True, tag="evaluation_progress"):
    """So far I have played `num_done` episodes of an Evaluate order. No answer: it may be lost."""

    order: int
    num_done: int


class StateReady(msgspec.Struct, frozen=True, tag="state_ready"):
    """Answer to SaveState: what decides what I do next is in array `state`, bytes that only workers read.

    Weights have the prefix "weight."; those of the version that the order names are left out.
    """

    order: int
    code_id: int  # of the policy that I act with; 0: none
    version: int  # of its weights; -1: none
    has_env_states: bool  # False: after a resume my envs begin new episodes
    left_out: LeftOut = []  # what else the state does not have, and why, for people


class StateRestored(msgspec.Struct, frozen=True, tag="state_restored"):
    """Answer to RestoreState."""

    order: int


class OrderFailed(msgspec.Struct, frozen=True, tag="order_failed"):
    """Answer to an order that could not be carried out; the worker is ready for the next one."""

    order: int
    kind: str  # "policy", "env" or "order"
    error: str
    traceback: str
    failures: list[EnvFailure] = []


class OrderCancelled(msgspec.Struct, frozen=True, tag="order_cancelled"):
    """Answer to an order that the head has cancelled."""

    order: int


class PullCode(msgspec.Struct, frozen=True, tag="pull_code"):
    """Send me the code of the newest policy."""

    held_code_id: int  # 0: none


class PullWeights(msgspec.Struct, frozen=True, tag="pull_weights"):
    """Send me the newest weights."""

    held_version: int  # what I act with now; -1: nothing


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """I end now."""

    why: str
    is_failure: bool = True  # False: I was told to; to be started again is no use of a worker's chances


FromWorker = (
    Join
    | Ready
    | NotReady
    | Heartbeat
    | RowsReady
    | RolloutReady
    | ValuesReady
    | EvaluationReady
    | EvaluationProgress
    | StateReady
    | StateRestored
    | OrderFailed
    | OrderCancelled
    | PullCode
    | PullWeights
    | Leaving
    | AboutChunks
)
Answer = (
    RowsReady | RolloutReady | ValuesReady | EvaluationReady | StateReady | StateRestored | OrderFailed | OrderCancelled
)


# -- head -> worker --


class ChangeEnvs(msgspec.Struct, frozen=True, kw_only=True, tag="change_envs"):
    """Have each env apply this in its next reset. Carried out even if it is cancelled; nobody waits for the answer.

    A worker that has a change from its Welcome already, or a later one, only answers.
    """

    order: int = 0
    accepted: int = 0
    number: int  # of the change, counted over the run
    kind: ChangeKind
    name: str  # of the attribute or method
    args: Any  # as values_wire has it, a tuple
    kwargs: Any


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """You are a member. `epoch` counts the processes this worker has had."""

    epoch: int
    first_order: int  # the number of the first order you will get
    plan: PoolPlan
    sync: SyncRule
    timing: Timing
    compression: str | None  # of images: None or "zstd"
    attributes: dict[str, Any]  # that SetAttr has set before, for your envs
    changes: list[ChangeEnvs] = []  # made before: the last of each kind and name, in this order
    device: str | None = None  # where your copies of the policy act, such as "cuda"; nil: on the CPU


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """You are no member, and need not ask again."""

    why: str


class Reset(msgspec.Struct, frozen=True, kw_only=True, tag="reset"):
    """Reset all envs, or those in `mask`. `seeds` has one for each env."""

    order: int = 0  # filled in when the order is issued, like `accepted`
    accepted: int = 0  # answers up to this one have been accepted
    autoreset: str
    seeds: list[int | None]
    options: Any
    mask: list[bool] | None


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One step of all envs with the actions in the arrays."""

    order: int = 0
    accepted: int = 0
    autoreset: str  # a replacement may not have been told yet


class Collect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="collect"):
    """Collect a rollout with this policy; the newest version and how far yours is from it are said here as well."""

    order: int = 0
    accepted: int = 0
    num_steps: int
    code_id: int
    version: int
    divergence: float | None  # None: not measured
    measured_version: int  # which version of yours that is about
    infos: InfoChoice = NUMBERS  # of the infos, what the rollout shall carry
    max_lag: int | None = None  # pull first if yours is more versions behind; None: only if the rule says so
    stream: int = 0  # counts streams; a pool with a batch size sends the envs ready first. 0: a rollout of all envs


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """Call a method of each env, or get an attribute."""

    order: int = 0
    accepted: int = 0
    name: str
    args: Any
    kwargs: Any
    env_ids: list[int] | None = None  # in this worker's pool, the values of the others are nil; None: all


class SetAttr(msgspec.Struct, frozen=True, kw_only=True, tag="set_attr"):
    """Set an attribute of each env."""

    order: int = 0
    accepted: int = 0
    name: str
    values: Any  # a list with one for each env


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Do not carry out orders up to `through`, nor those in `others`; answer each with OrderCancelled."""

    through: int
    others: list[int] = []


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """There is a new policy version, and yours is this far from it. See Collect."""

    version: int
    divergence: float | None
    measured_version: int


class Code(msgspec.Struct, frozen=True, tag="code"):
    """How to build your copy of the policy; a pickle of the head's is in array `pickled`."""

    code_id: int
    factory: str | None
    kwargs: Any


class Weights(msgspec.Struct, frozen=True, tag="weights"):
    """The newest weights, in the arrays."""

    version: int
    code_id: int
    digest: bytes  # of the weights, as your policy must hold them
    bfloat16: list[str]  # arrays that are the upper halves of float32


class Evaluate(msgspec.Struct, frozen=True, kw_only=True, tag="evaluate"):
    """Play whole episodes in envs of their own, with the policy that this order brings: your own copy stays as it is.

    Arrays of its code and weights have the prefixes "code." and "weight.".
    """

    order: int = 0
    accepted: int = 0
    seeds: list[int]  # of the episodes, one each
    num_recorded: int  # the first of them, whose frames are wanted
    is_deterministic: bool
    action_mask: str | None = None  # the key of the masks in the infos, for the policy
    code: Code
    weights: Weights


class SaveState(msgspec.Struct, frozen=True, kw_only=True, tag="save_state"):
    """Send me what decides what you do next, for a checkpoint; then go on as if nothing had been asked."""

    order: int = 0
    accepted: int = 0
    version: int  # of the newest policy: its weights need not be sent


class RestoreState(msgspec.Struct, frozen=True, kw_only=True, tag="restore_state"):
    """Go on where the worker was whose answer to SaveState had the bytes in array `state`.

    Arrays of its weights have the prefix "weight.". The first order of a run that goes on from a checkpoint; carried
    out even if it is cancelled. A process that comes later, in place of one that has answered, does not get it.
    """

    order: int = 0
    accepted: int = 0
    weights: Weights | None  # None: it had none


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Answer to Heartbeat, and sent to find out whether a silent worker is still connected."""

    accepted: int  # answers up to this one have been accepted
    is_ready: bool  # the head knows that your pool is built


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The run is over."""

    why: str


FromHead = (
    Welcome
    | Refused
    | Reset
    | Step
    | Collect
    | Call
    | SetAttr
    | ChangeEnvs
    | Evaluate
    | SaveState
    | RestoreState
    | Cancel
    | Announce
    | Code
    | Weights
    | Alive
    | Stop
    | AboutChunks
)
OrderMessage = Reset | Step | Collect | Call | SetAttr | ChangeEnvs | Evaluate | SaveState | RestoreState
ANSWER_TO: dict[type[OrderMessage], type[Answer]] = {
    Reset: RowsReady,
    Step: RowsReady,
    Collect: RolloutReady,
    Call: ValuesReady,
    SetAttr: ValuesReady,
    ChangeEnvs: ValuesReady,
    Evaluate: EvaluationReady,
    SaveState: StateReady,
    RestoreState: StateRestored,
}
