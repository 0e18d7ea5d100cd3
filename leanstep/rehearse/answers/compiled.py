"""torch.compile: the program's graphs as Dynamo and AOTAutograd trace them, recorded but not compiled.

A graph is decomposed and split into forward and backward as in Inductor. Its calls carry the number of the
region, so that a fusion model can merge the calls between matrix products. A pointwise result that only other
pointwise calls and reductions of the graph read gets no memory: a compiler holds it in registers. Code that
Dynamo cannot trace runs eagerly, as it would on a device.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._guards import TracingContext
from torch._higher_order_ops import auto_functionalize
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.rehearse.answers import flex_attention, triton_launches
from leanstep.rehearse.answers.attention import WHEN_RUN
from leanstep.rehearse.answers.torch_cuda import refuse_what_dynamo_refuses
from leanstep.rehearse.events import Event, Free, Launch, Region
from leanstep.rehearse.tape import Tape
from leanstep.rehearse.what_if import fused
from leanstep.tape.lines import IN_LEANSTEP, Line, nearest_line

NOTE = "torch.compile: graphs captured and priced by a fusion model, not compiled"
EAGER = "torch.compile ran eagerly"
NOT_CAPTURED = "torch.compile: torch could not capture this region, so it is counted as eager code"
# Calls that a fused kernel may contain besides those tagged pointwise.
REDUCTIONS = frozenset(
    "sum mean amax amin var_mean var max min argmax argmin prod any all logsumexp _softmax "
    "_log_softmax".split()
)
POINTWISE = frozenset(
    "convert_element_type where clone _to_copy full full_like ones_like zeros_like select_scatter "
    "slice_scatter constant_pad_nd cat scalar_tensor gelu_backward iota native_dropout bernoulli rand".split()
)
# Read their source at computed indices: a pointwise source is computed on the fly, not stored.
GATHERS = frozenset("gather index _unsafe_index index_select embedding".split())
# Write into their first argument, or into the buffer that a pointwise first argument is computed into.
SCATTERS = frozenset("scatter scatter_add scatter_reduce index_put _unsafe_index_put index_add".split())
VIEWS = frozenset(
    "view permute transpose t expand squeeze unsqueeze slice select split split_with_sizes unbind as_strided "
    "alias _unsafe_view reshape detach".split()
)
# Buffers that a pointwise result may need and still be computed where it is read: by several kernels, by one.
# Defaults of Inductor (realize_reads_threshold, realize_acc_reads_threshold).
MOST_READ_AGAIN, MOST_READ = 4, 8
# Custom ops that write into arguments: Inductor lets them write in place instead of cloning first.
_IN_PLACE: dict[str, Any] = {
    "auto_functionalized": lambda op, **kwargs: auto_functionalize.auto_functionalized_dense(
        op, (), **kwargs
    ),
    "auto_functionalized_v2": lambda op, **kwargs: auto_functionalize.auto_functionalized_v2_dense(
        op, (), **kwargs
    ),
}
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def install(tape: Tape, *, capture: bool) -> None:
    """Replace torch.compile and flex attention. Without `capture`, regions run eagerly and unmarked."""
    regions = _Regions(tape, capture)
    torch.compile = regions.compile  # pyright: ignore[reportAttributeAccessIssue]
    torch.nn.Module.compile = lambda self, *args, **kwargs: regions.compile_module(self)
    torch.compiler.cudagraph_mark_step_begin = lambda: None
    with contextlib.suppress(ImportError):
        flex_attention.install(tape)


class _Regions:
    def __init__(self, tape: Tape, capture: bool):
        self.tape, self.capture = tape, capture
        self.real_compile = torch.compile
        self.prepared = False
        self.backends: dict[str, Any] = {}

    def compile(self, model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: self.compile(function, **options)
        stand_in = getattr(model, "_when_compiled", None)
        if stand_in is not None:
            return stand_in
        self.tape.notes[NOTE if self.capture else EAGER] += 1
        if not self.capture:
            return CompiledModule(model) if isinstance(model, torch.nn.Module) else model
        name = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "?")
        passed_on = {key: options[key] for key in ("fullgraph",) if key in options}
        return self.real_compile(model, backend=self._backend(name), dynamic=False, **passed_on)

    def compile_module(self, module: torch.nn.Module) -> None:
        self.tape.notes[NOTE if self.capture else EAGER] += 1
        if self.capture:
            backend = self._backend(type(module).__name__)
            module._compiled_call_impl = self.real_compile(module._call_impl, backend=backend, dynamic=False)

    def _backend(self, name: str) -> Any:
        """Return one backend for all regions of a name.

        Equal blocks share their code, and Dynamo recompiles it for each new backend. After eight
        recompilations it would run the rest eagerly.
        """
        if name not in self.backends:
            self.backends[name] = self._new_backend(name)
        return self.backends[name]

    def _new_backend(self, name: str) -> Any:
        """Return AOTAutograd with Inductor's decompositions and partitioner, but no code generation."""
        import torch._dynamo as dynamo
        import torch._inductor.lowering  # decompositions (of pooling) name it without importing it
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        if not self.prepared:
            self.prepared = True
            dynamo.config.suppress_errors = True
            dynamo.config.automatic_dynamic_shapes = False
            logging.getLogger("torch._dynamo.convert_frame").addFilter(self._not_captured)
            if "__init_subclass__" not in vars(TorchDispatchMode):
                # At a graph break, Dynamo would trace the tape as part of the program; torch 2.13
                # and newer prevent that.
                kind: Any = type(self.tape)
                kind.__torch_dispatch__ = dynamo.disable(kind.__torch_dispatch__)
            refuse_what_dynamo_refuses()
            dynamo.allow_in_graph(torch.nn.functional.scaled_dot_product_attention)
        capture = aot_autograd(
            fw_compiler=functools.partial(self._graph, name),
            bw_compiler=functools.partial(self._graph, name),
            inference_compiler=lambda graph, inputs: self._graph(name, _simplified(graph), inputs),
            partition_fn=_forward_and_backward,
            decompositions=select_decomp_table,
        )

        def backend(graph: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
            with _collector_paused():
                return capture(graph, _of_the_capture(inputs), **kwargs)

        return backend

    def _not_captured(self, record: logging.LogRecord) -> bool:
        """Add an error that Dynamo only logs to the verdict."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or record.levelno < logging.WARNING:
            return True
        reason = (str(error).strip() or type(error).__name__).splitlines()
        self.tape.notes[f"{NOT_CAPTURED} ({self.tape.lines.here()}: {' '.join(reason[:2])[:200]})"] += 1
        return False

    def _graph(self, name: str, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._inductor import config

        regions = self.tape.recording.regions
        number = len(regions) + 1
        first = next((line for n in graph.graph.nodes if (line := _line_of(n)) is not None), None)
        pipelined = bool(getattr(config, "_micro_pipeline_tp", False))
        regions[number] = Region(number, name, first, 0, config.shape_padding, pipelined)
        program = _OnTape(self.tape, graph, number)

        def run(args: list[Any]) -> Any:
            regions[number] = regions[number]._replace(calls=regions[number].calls + 1)
            with self.tape.clock_held(functools.partial(_fused_now, self.tape)):
                return program.run(list(args) if type(args) is tuple else args)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run


def _forward_and_backward(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """Split a joint graph into forward and backward as Inductor does: simplify, then apply the min-cut."""
    from torch._functorch import partitioners

    # On a device, recomputed attention or dropout draws the same numbers again; here they have no values.
    partitioners.functionalize_rng_ops = lambda joint, forward, backward, *_: (forward, backward)
    return partitioners.min_cut_rematerialization_partition(_simplified(joint), inputs, **kwargs)


def _simplified(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Apply Inductor's own passes that run before the split: uniform constants, redundant conversions.

    A scatter into a constant becomes a comparison, which is fused
    (TORCHINDUCTOR_OPTIMIZE_SCATTER_UPON_CONST_TENSOR=0 turns this off, as in Inductor). Left out: padding and
    attention patterns, which Inductor benchmarks on the device, and Inductor's random numbers.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph

    class WithoutTensors(joint_graph.UniformValueConstantFolder):
        """Tensors that a graph holds have no values."""

        def run_node(self, node: torch.fx.Node) -> Any:
            return self.unknown_value if node.op == "get_attr" else super().run_node(node)

    fold = joint_graph.constant_fold_uniform_value
    changed = {
        "lazy_init": lambda *_: None,
        "UniformValueConstantFolder": WithoutTensors,
        "constant_fold_uniform_value": lambda graph: _on_host(fold, graph),
    }
    with mock.patch.multiple(joint_graph, **changed), config.patch(fallback_random=True):
        return joint_graph.joint_graph_passes(graph)


def _on_host(fold: Callable[[torch.fx.GraphModule], None], graph: torch.fx.GraphModule) -> None:
    """Fold constants with host tensors: folding runs their constructors, and the device has no memory."""
    placed = {node: node.kwargs for node in graph.graph.nodes if node.kwargs.get("device") is not None}
    for node, kwargs in placed.items():
        node.kwargs = {**kwargs, "device": torch.device("cpu")}
    fold(graph)
    for node in graph.graph.nodes:
        if node in placed:
            node.kwargs = placed[node]


def _of_the_capture(inputs: list[Any]) -> list[Any]:
    """Return the tape's fake tensors converted to Dynamo's own mode: torch before 2.13 rejects others."""
    mode = TracingContext.get().fake_mode
    return [mode.from_tensor(x) if mode is not None and isinstance(x, FakeTensor) else x for x in inputs]


@contextlib.contextmanager
def _collector_paused():
    """Pause garbage collection: a capture creates millions of objects and no garbage of the program."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _fused_now(tape: Tape, events: list[Event]) -> list[Event]:
    """Return a region's events as they are priced, for the clock that the program can read."""
    freed = {event.storage for event in events if isinstance(event, Free)}
    written = {number for event in events if isinstance(event, Launch) for number in event.writes}
    storages = tape.recording.storages
    alive = {number for number in written - freed if storages[number].category != "registers"}
    return fused(events, tape.recording.regions, alive)


class _Call(NamedTuple):
    """One node of a captured graph. ends: nodes whose values are not read after it."""

    node: torch.fx.Node
    run: Callable[..., Any]
    line: Line | None
    in_registers: bool
    ends: list[torch.fx.Node]


class _OnTape:
    """A captured graph that runs call by call. Each call has the program line that it came from."""

    def __init__(self, tape: Tape, graph: torch.fx.GraphModule, number: int):
        self.tape, self.graph, self.number = tape, graph, number
        nodes = list(graph.graph.nodes)
        inside = _kept_in_registers(graph)
        ends = _last_uses(nodes, inside)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.constants = [node for node in nodes if node.op == "get_attr"]
        self.output = nodes[-1]
        self.calls = [
            _Call(node, self._runner(node), _line_of(node), node in inside, ends.get(node, []))
            for node in nodes
            if node.op == "call_function"
        ]

    def _runner(self, node: torch.fx.Node) -> Callable[..., Any]:
        name = getattr(node.target, "_name", "")
        if name.startswith("triton_kernel_wrapper"):
            return lambda **arguments: triton_launches.captured(self.tape, arguments)
        target: Any = node.target
        if target in WHEN_RUN:
            return functools.partial(WHEN_RUN[target], self.tape)
        return _IN_PLACE.get(name, target)

    def run(self, inputs: list[Any]) -> Any:
        """Run the graph and empty the list of inputs, so that an input is freed after its last use."""
        values = dict(zip(self.inputs, inputs, strict=True))
        inputs.clear()
        for node in self.constants:
            values[node] = operator.attrgetter(str(node.target))(self.graph)
        lines, tape = self.tape.lines, self.tape
        outer = lines.fixed, tape.in_registers  # of a custom op with a compiled body
        try:
            for call in self.calls:
                lines.fixed, tape.in_registers = (call.line, self.number), call.in_registers
                args = _with_values(call.node.args, values)
                values[call.node] = call.run(*args, **_with_values(call.node.kwargs, values))
                del args
                for node in call.ends:
                    del values[node]
        finally:
            lines.fixed, tape.in_registers = outer
        return _with_values(self.output.args[0], values)


def _last_uses(
    nodes: list[torch.fx.Node], in_registers: set[torch.fx.Node]
) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Return, for each node, the nodes whose last reader it is. A node that is never read ends itself.

    A value held in registers is computed where it is read, so its arguments stay alive until then.
    """
    order = {node: index for index, node in enumerate(nodes)}
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    for user in reversed(nodes):
        reads_at = last.setdefault(user, user) if user in in_registers else user
        last.setdefault(user, user)
        for node in user.all_input_nodes:
            last[node] = max(reads_at, last.get(node, reads_at), key=order.__getitem__)
    ends: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node, end in last.items():
        ends.setdefault(end, []).append(node)
    return ends


def _with_values(tree: Any, values: dict[torch.fx.Node, Any]) -> Any:
    """Return a node's arguments with nodes replaced by their values."""
    if isinstance(tree, torch.fx.Node):
        return values[tree]
    if isinstance(tree, (list, tuple)):
        branches = [_with_values(branch, values) for branch in tree]
        return tuple(branches) if isinstance(tree, tuple) else branches
    if isinstance(tree, dict):
        return {key: _with_values(branch, values) for key, branch in tree.items()}
    if isinstance(tree, slice):
        return slice(*[_with_values(part, values) for part in (tree.start, tree.stop, tree.step)])
    return tree


def _line_of(node: torch.fx.Node) -> Line | None:
    """Return the innermost frame of a node's stack trace outside torch, as recorded by Dynamo."""
    cached = node.meta.get("rehearsed_line", False)
    if cached is not False:
        return cached
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [(file, int(number), function) for file, number, function in frames]
    line = nearest_line(frames) or nearest_line(frames, IN_LEANSTEP)
    node.meta["rehearsed_line"] = line
    return line


def _call_name(node: torch.fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _is_pointwise(node: torch.fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or _call_name(node) in POINTWISE


def _is_view(node: torch.fx.Node) -> bool:
    return _call_name(node) in VIEWS or node.target is getattr


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the calls that read a value, directly or through views."""
    return [reader for user in node.users for reader in (_readers(user) if _is_view(user) else [user])]


def _can_fuse(node: torch.fx.Node, reader: torch.fx.Node) -> bool:
    """Return whether a compiler can compute the pointwise `node` inside the kernel of this reader."""
    if reader.op != "call_function":
        return False
    name = _call_name(reader)
    if name in SCATTERS:  # the kernel that fills what is written into
        return reader.args[0] is node and node not in reader.args[1:]
    return _is_pointwise(reader) or name in REDUCTIONS or name in GATHERS


def _stages(nodes: Iterable[torch.fx.Node]) -> dict[torch.fx.Node, int]:
    """Count the unfusable calls on the longest path to each node: nodes of one stage can share a kernel."""
    stages: dict[torch.fx.Node, int] = {}
    for node in nodes:
        name = _call_name(node)
        fused = _is_pointwise(node) or _is_view(node) or name in REDUCTIONS or name in GATHERS
        alone = node.op == "call_function" and not fused
        stages[node] = max((stages[source] for source in node.all_input_nodes), default=0) + alone
    return stages


def _kept_in_registers(graph: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Return the pointwise results that get no memory because the kernels that read them compute them.

    As in Inductor, a result shares one kernel with all its readers, or each reader recomputes it from a few
    buffers.
    """
    unmaterialized: set[torch.fx.Node] = set()
    buffers: dict[torch.fx.Node, frozenset[torch.fx.Node]] = {}  # that a kernel loads to have this value
    stages = _stages(graph.graph.nodes)
    for node in graph.graph.nodes:
        loaded = frozenset().union(*(buffers[source] for source in node.all_input_nodes))
        buffers[node] = loaded if _is_view(node) else frozenset((node,))
        if node.op != "call_function" or not _is_pointwise(node):
            continue
        readers = _readers(node)
        if not all(_can_fuse(node, reader) for reader in readers):
            continue
        most = MOST_READ_AGAIN if len(readers) > 1 else MOST_READ
        if len(loaded) <= most or all(stages[reader] == stages[node] for reader in readers):
            unmaterialized.add(node)
            buffers[node] = loaded
    return unmaterialized


class CompiledModule(torch.nn.Module):
    """The result of torch.compile(module) when regions run eagerly: names still start with `_orig_mod.`.

    Like torch's own, it reads and sets attributes of the module, except for what it has itself: a wrapped
    `forward` calls its own.
    """

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        del self.training
        self._orig_mod = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_mod":
            return self._modules["_orig_mod"]
        return getattr(self._modules["_orig_mod"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name == "_orig_mod" or hasattr(type(self), name)
        if is_own or "_orig_mod" not in self.__dict__.get("_modules", ()):
            super().__setattr__(name, value)
        else:
            setattr(self._orig_mod, name, value)

    def __len__(self) -> int:
        return len(self._orig_mod)  # pyright: ignore[reportArgumentType]

    def __bool__(self) -> bool:
        return True  # also without a length
