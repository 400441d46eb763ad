"""A device of torch's own kind that is none: "fakegpu". For tests of GPU code where there is no GPU.

Its memory is the host's, and the CPU computes for it. But torch takes it for another device, in all threads, and it is
as strict as a real one: its tensors do not mix with those of the CPU (single numbers excepted, as on CUDA), and cannot
become arrays. It has random numbers of its own. It counts the copies from and to the host.

What it cannot show: speed, streams, copies that are not finished, page-locked memory, full memory, other rounding.

It is registered when this module is imported, and stays until the process ends.
"""

import contextlib
from dataclasses import dataclass

import torch  # noqa: TID253 - a device of torch is what this is about
from torch.utils._pytree import tree_leaves, tree_map  # noqa: TID253
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # noqa: TID253

NAME = "fakegpu"


@dataclass
class Copies:
    """Number of copies between the device and the host."""

    to_device: int = 0
    to_host: int = 0


COPIES = Copies()


@contextlib.contextmanager
def counted_copies():
    """Those made inside. Numbers that are asked for one by one, as by item(), count too."""
    before, counted = Copies(COPIES.to_device, COPIES.to_host), Copies()
    yield counted
    counted.to_device, counted.to_host = COPIES.to_device - before.to_device, COPIES.to_host - before.to_host


class FakeGpuModule:
    """torch.fakegpu, with what torch.cuda has."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def is_initialized(self):
        return True

    is_available = is_initialized

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def synchronize(self, device=NAME):
        """Nothing is ever under way. TensorDict asks for it as soon as there is a device."""

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        self.generator.manual_seed(seed)

    def get_rng_state(self, device=NAME):
        return self.generator.get_state()

    def set_rng_state(self, state, device=NAME):
        self.generator.set_state(state)

    def get_rng_state_all(self):
        return [self.get_rng_state()]

    def set_rng_state_all(self, states):
        self.set_rng_state(states[0])


_setup_privateuseone_for_python_backend(NAME, backend_module=FakeGpuModule())
DEVICE = torch.device(NAME, 0)
aten = torch.ops.aten


class FakeGpuTensor(torch.Tensor):
    """A tensor of the device; `held` has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=DEVICE, requires_grad=False
        )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        # In inference mode operations that are made of others come here, too; elsewhere only those do.
        made_of_others = operation.decompose(*args, **(kwargs or {}))
        return _computed(operation, args, kwargs or {}) if made_of_others is NotImplemented else made_of_others

    def __tensor_flatten__(self):
        """Have module.to() put the device's tensors into the parameters that are there, as it does for real devices."""
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return FakeGpuTensor(inner["held"])

    def __reduce_ex__(self, protocol):
        """As torch.nn.Parameter does; a tensor itself needs the device to be unpickled, so it must not get here."""
        if getattr(self, "_is_param", False):
            return torch._utils._rebuild_parameter, (self.data, self.requires_grad, {})
        raise AssertionError("a tensor of the learner's device is in the pickle")

    def __repr__(self, *, tensor_contents=None):
        return f"FakeGpuTensor({self.held!r})"


def _computed(operation, args, kwargs):
    """What the CPU computes for the device."""
    leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    is_copy = operation.overloadpacket in (aten.copy_, aten._to_copy, aten._copy_from)
    if not is_copy and any(each.is_cpu and each.dim() for each in leaves):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {DEVICE} and cpu: {operation}")
    goes_to = kwargs.get("device") or DEVICE
    kwargs = {name: each for name, each in kwargs.items() if name not in ("device", "pin_memory")}
    if "device" in (names := [each.name for each in operation._schema.arguments]):
        kwargs["device"] = torch.device("cpu")
    if "generator" in names and kwargs.get("generator") is None:
        kwargs["generator"] = torch.get_device_module(NAME).generator
    held = {id(each.held): each for each in leaves if isinstance(each, FakeGpuTensor)}
    on_cpu = {id(each) for each in leaves if not isinstance(each, FakeGpuTensor)}
    args, kwargs = tree_map(lambda each: each.held if isinstance(each, FakeGpuTensor) else each, (args, kwargs))
    result = SPECIAL.get(operation.overloadpacket, operation)(*args, **kwargs)
    _count(operation, is_copy, leaves, goes_to)

    def wrapped(each):
        if not isinstance(each, torch.Tensor) or id(each) in on_cpu or goes_to.type == "cpu":
            return each
        return held.get(id(each)) if id(each) in held else FakeGpuTensor(each)

    return tree_map(wrapped, result)


def _count(operation, is_copy, leaves, goes_to):
    if operation.overloadpacket in (aten._local_scalar_dense, aten.equal):
        COPIES.to_host += 1
    if not is_copy:
        return
    if operation.overloadpacket is aten.copy_:
        target, source = (each.device for each in leaves)
    elif operation.overloadpacket is aten._copy_from:
        source, target = (each.device for each in leaves)
    else:
        target, source = goes_to, leaves[0].device
    COPIES.to_device += source.type == "cpu" and target.type == NAME
    COPIES.to_host += source.type == NAME and target.type == "cpu"


def _lstm_cell(input_gates, hidden_gates, c, input_bias=None, hidden_bias=None):
    """Devices other than the CPU have one operation for it."""
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.chunk(4, 1)
    after = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(after), after, gates


def _copy_from(source, target, non_blocking=False):
    return target.copy_(source)


SPECIAL = {aten._thnn_fused_lstm_cell: _lstm_cell, aten._copy_from: _copy_from}

# What makes tensors from nothing comes here; all else has a tensor of the device, and goes to __torch_dispatch__.
_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(lambda operation, *args, **kwargs: _computed(operation, args, kwargs), "PrivateUse1")
