"""What the API server says -> what the user reads. Objects as real servers write them, cut to what matters."""

import pytest

from envfleet.contract.errors import ClusterError, UsageError
from envfleet.launchers.kubernetes.api import Forbidden, NotThere, Unreachable, refusal
from envfleet.launchers.kubernetes.objects import is_failure, is_in, last_words
from envfleet.launchers.kubernetes.status import IMAGE_PATIENCE_S, REVIVAL_S, Kind, RunObjects, needs_warnings, state_of
from envfleet.launchers.launcher import WorkerState

PENDING, RUNNING, ENDED, REFUSED = (
    WorkerState.PENDING,
    WorkerState.RUNNING,
    WorkerState.ENDED,
    WorkerState.REFUSED,
)


def job(name="run", num_workers=2, created="2026-01-01T00:00:00Z", worker=None, **status):
    labels = {"envfleet-run": "run"} | ({} if worker is None else {"envfleet-worker": str(worker)})
    return {
        "kind": "Job",
        "metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": created, "labels": labels},
        "spec": {"completions": num_workers, "parallelism": num_workers},
        "status": status,
    }


def pod(index=0, name=None, of="run", created="2026-01-01T00:00:01Z", phase="Running", state=None, worker=None, **more):
    name = name or f"{of}-{index}-x7k2p"
    number = {"labels": {"envfleet-worker": str(worker)}} if worker is not None else {}
    if worker is None:
        number = {"annotations": {"batch.kubernetes.io/job-completion-index": str(index)}}
    status = {"phase": phase, **more}
    if state is not None:
        status["containerStatuses"] = [{"name": "worker", "state": state, "restartCount": 0}]
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "creationTimestamp": created,
            "ownerReferences": [{"kind": "Job", "name": of, "uid": f"uid-{of}"}],
            **number,
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "worker", "image": "example.org/envs:1"}]},
        "status": status,
    }


def ended(code, reason="Error", **more):
    return {"terminated": {"exitCode": code, "reason": reason, **more}}


def waiting(reason, message=None):
    return {"waiting": {"reason": reason, "message": message}}


def condition(kind, reason, message, status="True"):
    return {"type": kind, "status": status, "reason": reason, "message": message}


def warning(about, reason, message, at="2026-01-01T00:00:10Z"):
    return {
        "involvedObject": {"uid": about["metadata"]["uid"]},
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
        "type": "Warning",
    }


def told(jobs, pods, warnings=(), age_s=0.0, worker=0):
    situation = RunObjects(jobs, pods, warnings).situation(worker)
    return state_of(situation, age_s), situation.words


def has(words, *parts):
    for part in parts:
        assert part in words, words


def test_running():
    state, words = told([job()], [pod(state={"running": {}})])
    assert state is RUNNING
    has(words, "run-0-x7k2p", "node n1")


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"])
def test_image_cannot_be_pulled(reason):
    message = 'Back-off pulling image "example.org/envs:1"'
    pods = [pod(phase="Pending", state=waiting(reason, message))]
    assert told([job()], pods)[0] is PENDING  # it may be the registry's bad moment
    state, words = told([job()], pods, age_s=IMAGE_PATIENCE_S)
    assert state is REFUSED
    has(words, reason, message, "'example.org/envs:1'", "image_pull_secrets=")


def test_image_name_is_no_name():
    pods = [pod(phase="Pending", state=waiting("InvalidImageName", "couldn't parse image name"))]
    state, words = told([job()], pods)
    assert state is REFUSED
    has(words, "couldn't parse image name")


def test_container_cannot_be_made():
    pods = [pod(phase="Pending", state=waiting("CreateContainerConfigError", 'secret "run" not found'))]
    assert told([job()], pods)[0] is PENDING
    state, words = told([job()], pods, age_s=IMAGE_PATIENCE_S)
    assert state is REFUSED
    has(words, 'secret "run" not found')


def test_unschedulable():
    message = "0/3 nodes are available: 3 Insufficient cpu."
    pods = [pod(phase="Pending", conditions=[condition("PodScheduled", "Unschedulable", message, "False")])]
    state, words = told([job()], pods, age_s=1e6)
    assert state is PENDING  # the launcher's queue_timeout_s says how long
    has(words, "Unschedulable", message)


def test_not_yet_looked_at_by_the_scheduler():
    state, words = told([job()], [pod(phase="Pending")])
    assert state is PENDING
    has(words, "waits to be started")


def test_slow_to_start_says_why():
    one = pod(phase="Pending", state=waiting("ContainerCreating"))
    event = warning(one, "FailedMount", 'persistentvolumeclaim "data" not found')
    older = warning(one, "FailedMount", "an older word", at="2026-01-01T00:00:02Z")
    state, words = told([job()], [one], [event, older])
    assert state is PENDING
    has(words, "ContainerCreating", "FailedMount", '"data" not found')
    assert needs_warnings(RunObjects([job()], [one]).situation(0), 60.0)
    assert not needs_warnings(RunObjects([job()], [one]).situation(0), 1.0)


def test_a_failed_pod_is_replaced_by_its_job():
    pods = [pod(phase="Failed", state=ended(1))]
    state, words = told([job()], pods)
    assert state is PENDING
    has(words, "exit code 1")
    assert told([job()], pods, age_s=REVIVAL_S)[0] is ENDED  # its Job takes too long
    again = pod(name="run-0-newer", created="2026-01-01T00:00:20Z", state={"running": {}})
    assert told([job()], [again, *pods], age_s=REVIVAL_S)[0] is RUNNING


def test_of_two_pods_of_one_second_the_one_that_runs_counts():
    pods = [pod(name="run-0-a", state={"running": {}}), pod(name="run-0-b", phase="Failed", state=ended(1))]
    assert told([job()], pods)[0] is RUNNING


@pytest.mark.parametrize(
    ("state", "parts"),
    [
        (ended(137, "OOMKilled"), ["OOMKilled", "raise memory_per_worker"]),
        (ended(137), ["killed by SIGKILL"]),
        (ended(139), ["killed by SIGSEGV"]),
        (ended(200), ["killed by signal 72"]),
        (ended(128, "StartError", message='exec: "pythn": not found'), ["exit code 128", "StartError", '"pythn"']),
        (ended(3), ["exit code 3"]),
    ],
)
def test_how_it_ended(state, parts):
    has(told([job()], [pod(phase="Failed", state=state)])[1], *parts)


def test_evicted():
    conditions = [condition("DisruptionTarget", "TerminationByKubelet", "The node was low on resource: memory.")]
    one = pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory.", conditions=conditions)
    state, words = told([job()], [one])
    assert state is PENDING
    has(words, "Evicted", "low on resource", "disrupted: TerminationByKubelet")
    assert not is_failure(one)


def test_being_deleted():
    one = pod(state={"running": {}})
    one["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    state, words = told([job()], [one])
    assert state is RUNNING
    has(words, "is being deleted")


def test_node_does_not_report():
    assert told([job()], [pod(phase="Unknown")])[0] is RUNNING


def ready(status, reason=None):
    return {"type": "Ready", "status": status, "reason": reason}


def test_node_is_taken_for_lost():
    """By the node controller, which gives no reason; what to make of it is for the head, which has the connection."""
    one = pod(state={"running": {}}, conditions=[ready("False"), condition("ContainersReady", None, None)])
    state, words = told([job()], [one])
    assert state is ENDED
    has(words, "node n1", "its node does not report")
    one["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"  # after five minutes, by its taint
    state, words = told([job()], [one])
    assert state is ENDED
    has(words, "is being deleted", "its node does not report")


@pytest.mark.parametrize("reason", ["ContainersNotReady", "ReadinessGatesNotReady"])
def test_a_pod_that_its_kubelet_reports_as_not_ready_runs(reason):
    assert told([job()], [pod(state={"running": {}}, conditions=[ready("False", reason)])])[0] is RUNNING
    assert told([job()], [pod(state={"running": {}}, conditions=[ready("True")])])[0] is RUNNING


def with_sidecar(one, state):
    """A container that the cluster has added; a kubelet sorts them by name."""
    one["status"]["containerStatuses"].insert(0, {"name": "a-proxy", "state": state, "restartCount": 2})
    one["spec"]["containers"].insert(0, {"name": "a-proxy", "image": "example.org/proxy:1"})
    return one


def test_a_worker_that_ended_beside_a_sidecar():
    one = with_sidecar(pod(state=ended(1)), {"running": {}})
    state, words = told([job()], [one])
    assert state is ENDED
    has(words, "exit code 1", "other containers of its pod still run")
    assert told([job()], [with_sidecar(pod(phase="Pending", state=ended(1)), waiting("ErrImagePull"))])[0] is ENDED
    one["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    assert told([job()], [one])[0] is PENDING  # it was asked to leave: its Job makes another


def test_a_worker_that_ended_just_now_alone():
    """A kubelet may report the container before the phase."""
    state, words = told([job()], [pod(state=ended(1))])
    assert state is PENDING
    has(words, "makes another")


@pytest.mark.parametrize("state", [ended(1), waiting("ImagePullBackOff"), waiting("CrashLoopBackOff"), {"running": {}}])
@pytest.mark.parametrize("phase", ["Running", "Pending"])
def test_the_state_of_a_sidecar_says_nothing(state, phase):
    assert told([job()], [with_sidecar(pod(phase=phase, state={"running": {}}), state)], age_s=1e6)[0] is RUNNING


def test_the_image_is_the_workers():
    one = with_sidecar(pod(phase="Pending", state=waiting("ErrImagePull")), {"running": {}})
    has(told([job()], [one])[1], "'example.org/envs:1'")


def suspended(**status):
    one = job(**status)
    one["spec"]["suspend"] = True
    return one


def test_a_suspended_job_is_a_queue():
    leaving = pod(state={"running": {}})
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    for pods in ([], [pod(phase="Failed", state=ended(4))], [leaving], [pod(phase="Succeeded", state=ended(0))]):
        state, words = told([suspended()], pods, age_s=1e6)
        assert state is PENDING
        has(words, "Job run is suspended")
    assert told([suspended(failedIndexes="0")], [])[0] is PENDING
    failed = suspended(conditions=[condition("Failed", "DeadlineExceeded", "")])
    assert told([failed], [])[0] is ENDED


def test_a_replacement_of_a_suspended_job_runs():
    new = job("run-w0-1", 1, "2026-01-01T00:02:00Z", worker=0)
    its_pod = pod(of="run-w0-1", created="2026-01-01T00:02:01Z", worker=0, state={"running": {}})
    assert told([suspended(), new], [its_pod])[0] is RUNNING


@pytest.mark.parametrize(
    ("one", "counts"),
    [
        (pod(phase="Failed", state=ended(1)), True),
        (pod(phase="Failed", state=ended(3)), True),
        (pod(phase="Failed", state=ended(4)), False),
        (pod(phase="Succeeded", state=ended(0, "Completed")), False),
        (pod(state={"running": {}}), False),
    ],
)
def test_which_ends_are_failures(one, counts):
    assert is_failure(one) is counts


def test_crash_loop_of_a_restarting_container():
    one = pod(state=waiting("CrashLoopBackOff", "back-off 40s restarting failed container"))
    one["status"]["containerStatuses"][0] |= {"lastState": ended(1), "restartCount": 3}
    state, words = told([job()], [one])
    assert state is PENDING
    has(words, "CrashLoopBackOff", "exit code 1", "3 restarts")


def test_job_has_reached_its_limit():
    message = "Job has reached the specified backoff limit"
    one = job(conditions=[condition("Failed", "BackoffLimitExceeded", message)])
    state, words = told([one], [pod(phase="Failed", state=ended(1))])
    assert state is ENDED
    has(words, "exit code 1", "BackoffLimitExceeded", message)
    state, words = told([one], [])
    assert state is ENDED
    has(words, "BackoffLimitExceeded")


def test_index_has_reached_its_limit():
    one = job(failedIndexes="0,4-7", num_workers=9)
    assert told([one], [pod(phase="Failed", state=ended(1))])[0] is ENDED
    assert told([one], [pod(1, phase="Failed", state=ended(1))], worker=1)[0] is PENDING


def test_told_to_stop():
    done = pod(phase="Succeeded", state=ended(0, "Completed"))
    state, words = told([job(completedIndexes="0")], [done])
    assert state is ENDED
    has(words, "exit code 0")
    assert told([job()], [done])[0] is PENDING  # of an index that was there before the fleet shrank, and grew


def test_no_pod_yet():
    state, words = told([job()], [])
    assert state is PENDING
    has(words, "has not made its pod yet")
    assert needs_warnings(RunObjects([job()], []).situation(0), 0.0)
    assert told([job()], [], age_s=REVIVAL_S)[0] is ENDED


def test_quota():
    message = (
        'Error creating: pods "run-0-abcde" is forbidden: exceeded quota: mine, requested: pods=1, limited: pods=1'
    )
    state, words = told([job()], [], [warning(job(), "FailedCreate", message)], age_s=1e6)
    assert state is PENDING  # until somebody else's pods end
    has(words, "FailedCreate", "exceeded quota: mine")


def test_pods_are_forbidden():
    message = 'Error creating: pods "run-0-abcde" is forbidden: error looking up service account rl/x: not found'
    events = [warning(job(), "FailedCreate", message)]
    assert told([job()], [], events)[0] is PENDING
    state, words = told([job()], [], events, age_s=IMAGE_PATIENCE_S)
    assert state is REFUSED
    has(words, "service account rl/x")


def test_job_is_gone():
    assert told([], []) == (ENDED, "its Job is gone: it was deleted by others")
    assert told([], [pod(phase="Failed", state=ended(137))])[0] is ENDED
    leaving = job()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    state, words = told([leaving], [])
    assert state is ENDED
    has(words, "is being deleted")


def test_a_replacement_counts_from_when_it_is_there():
    fleet = job(failedIndexes="0")
    old = pod(phase="Failed", state=ended(1))
    new = job("run-w0-1", 1, "2026-01-01T00:02:00Z", worker=0)
    state, words = told([fleet, new], [old])
    assert state is PENDING
    has(words, "run-w0-1 has not made its pod yet")
    its_pod = pod(of="run-w0-1", created="2026-01-01T00:02:01Z", worker=0, state={"running": {}})
    assert told([fleet, new], [old, its_pod])[0] is RUNNING
    assert told([fleet, new], [old, its_pod], worker=1)[0] is PENDING
    # The fleet's own pod, which comes later, has taken the worker's place.
    done = pod(of="run-w0-1", created="2026-01-01T00:02:01Z", worker=0, phase="Succeeded", state=ended(0))
    later = pod(name="run-0-later", created="2026-01-01T00:03:00Z", state={"running": {}})
    finished = job("run-w0-1", 1, "2026-01-01T00:02:00Z", worker=0, conditions=[condition("Complete", "", "")])
    assert told([job(), finished], [old, done, later])[0] is RUNNING


def test_pods_of_others_are_not_ours():
    stranger = pod(state={"running": {}})
    del stranger["metadata"]["annotations"]
    situation = RunObjects([job()], [stranger]).situation(0)
    assert situation.kind is Kind.NO_POD


@pytest.mark.parametrize(
    ("intervals", "index", "expected"),
    [("", 0, False), (None, 0, False), ("0", 0, True), ("1,3-5,7", 4, True), ("1,3-5,7", 6, False), ("10", 1, False)],
)
def test_intervals(intervals, index, expected):
    assert is_in(intervals, index) is expected


def test_last_words():
    assert last_words("", True) == ""
    assert last_words("a\n\x1b[31mb\x1b[0m\n\n", True) == "; its last line: b"
    assert last_words("\n".join(map(str, range(20))), False).splitlines()[1:] == [f"  {n}" for n in range(10, 20)]


@pytest.mark.parametrize(
    ("status", "words", "kind", "parts"),
    [
        (401, "Unauthorized", ClusterError, ["Log in again", "context="]),
        (
            403,
            'jobs.batch is forbidden: User "system:serviceaccount:rl:me" cannot create resource "jobs"',
            Forbidden,
            ["system:serviceaccount:rl:me may not create jobs in namespace rl", "Role", "deploy/rbac.yaml"],
        ),
        (403, 'jobs.batch "run" is forbidden: exceeded quota: few', ClusterError, ["quota of namespace rl", "few"]),
        (404, 'namespaces "rl" not found', ClusterError, ["no namespace 'rl'", "kubectl create namespace rl"]),
        (404, 'jobs.batch "run" not found', NotThere, ["run"]),
        (422, 'Job.batch "run" is invalid: spec', UsageError, ["Kubernetes refuses it", "is invalid"]),
        (503, "apiserver is shutting down", Unreachable, ["cannot answer now"]),
        (409, "already exists", ClusterError, ["409"]),
    ],
)
def test_what_the_api_server_refuses(status, words, kind, parts):
    error = refusal(status, words, "create jobs in namespace rl", "create", "jobs", "rl")
    assert type(error) is kind
    has(str(error), words, *parts)
