"""Effects of torch.compile on the step: graphs, what remains of each line, breaks, recompilations.

Compiled functions run eagerly while ops are recorded, because the compiler does not work under a dispatch
mode. At all other times they run compiled, and every graph that Dynamo passes to the user's backend is read;
its nodes record their source lines. For Inductor the kernels after fusion are read, for other AOTAutograd
backends the ATen calls; any other backend is assumed to run the calls of the graph as they are. Inductor's
disk caches are bypassed, because a cached graph has no source lines.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from leanstep.diagnose.step_clock import own_seconds
from leanstep.tape.lines import LIBRARY, USER, Line, judge_code

Place = tuple[str, int]
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")


@dataclass(frozen=True)
class Kernel:
    """One launch of compiled code: the ops in it with their places, and the bytes it writes."""

    ops: frozenset[tuple[str, Place]]
    backward: bool
    bytes: int


@dataclass(frozen=True)
class Saved:
    """A tensor that a compiled forward saves for its backward."""

    place: Place
    shape: tuple[int, ...]
    bytes: int


@dataclass
class Graph:
    """One graph as passed to a backend. `level`: kernels, ATen calls, or calls (of the program itself)."""

    function: str
    place: Place | None
    backend: str
    calls_in_graph: int
    seconds: float = 0.0
    level: str = "calls"
    kernels: list[Kernel] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    runs: int = 0
    files: frozenset[str] = frozenset()

    def as_dict(self) -> dict[str, Any]:
        file, number = self.place or ("", 0)
        return {
            "function": self.function,
            "file": file,
            "line": number,
            "backend": self.backend,
            "calls": self.calls_in_graph,
            "kernels": None if self.level == "calls" else len(self.kernels),
            "compile_s": self.seconds,
        }


@dataclass(frozen=True)
class Interruption:
    """A graph break or a recompilation: where, why, and the seconds that the compiler spent on it."""

    kind: str
    file: str
    line: int
    reason: str
    seconds: float
    count: int = 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "file": self.file,
            "line": self.line,
            "reason": self.reason,
            "compile_s": self.seconds,
            "count": self.count,
        }


class CompiledCode:
    """Disables the compiler while ops are recorded, and reads its graphs at all other times."""

    def __init__(self) -> None:
        self._stance: Any = None
        self._graphs: dict[tuple[str, Place | None], Graph] = {}
        self._current: list[Graph] = []
        self._began, self._breaks_before = 0.0, 0
        self._steps = 0
        # Inductor's kernels are read from its first graph until reading ends.
        self._reading: contextlib.ExitStack | None = None
        self._reads_inductor = False

    # While ops are recorded

    def enter(self) -> None:
        # The user's own stance (fail_on_recompile ...) is restored afterwards.
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is not None and self._stance is None:
            self._stance = dynamo._stance
            # Not through set_stance(), which refuses inside a compiled optimizer's hook.
            dynamo._stance = dynamo.DynamoStance("force_eager")

    def leave(self) -> None:
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is not None and self._stance is not None:
            dynamo._stance = self._stance
        self._stance = None

    # At all other times

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read every graph that is compiled meanwhile. Names that torch no longer has are skipped."""
        with contextlib.ExitStack() as stack:
            self._reading = stack
            with contextlib.suppress(ImportError, AttributeError):
                from torch._dynamo import output_graph, utils
                from torch._dynamo.backends import common

                self._began, self._breaks_before = time.time(), len(utils.graph_break_reasons)
                _replace(stack, output_graph.OutputGraph, "_call_user_compiler", self._compiling)
                _replace(stack, common, "aot_module_simplified", self._aot)
            yield

    def step_ended(self) -> None:
        """Count a step that ran fully compiled: runs of a graph are counted per step."""
        self._steps += 1

    def _compiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compiling(output: Any, gm: Any, example_inputs: Any) -> Any:
            graph = self._graph_of(output, gm)
            self._current.append(graph)
            begin = own_seconds()
            try:
                if graph.backend == "inductor":
                    self._read_inductor()
                compiled = original(output, gm, example_inputs)
            finally:
                self._current.pop()
                graph.seconds = own_seconds() - begin
            self._graphs[graph.function, graph.place] = graph

            def counted(*args: Any) -> Any:
                graph.runs += 1
                return compiled(*args)

            return counted

        return compiling

    def _graph_of(self, output: Any, gm: Any) -> Graph:
        code = getattr(getattr(output, "root_tx", None), "f_code", None)
        nodes = [n for n in gm.graph.nodes if n.op.startswith("call_")]
        places = [place for place in map(place_of, nodes) if place is not None]
        name = getattr(code, "co_name", "?")
        resumed = _RESUMED.match(name)
        compiler: Any = getattr(output, "compiler_fn", None)
        backend = str(
            getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", type(compiler).__name__)
        )
        graph = Graph(resumed[1] if resumed else name, places[0] if places else None, backend, len(nodes))
        graph.files = frozenset(file for file, _ in places)
        return graph

    def _read_inductor(self) -> None:
        if self._reads_inductor or self._reading is None:
            return
        self._reads_inductor = True
        with contextlib.suppress(ImportError, AttributeError):
            from torch._functorch import config as aot_config
            from torch._inductor import config, scheduler

            self._reading.enter_context(config.patch(fx_graph_cache=False, fx_graph_remote_cache=False))
            self._reading.enter_context(aot_config.patch(enable_autograd_cache=False))
            _replace(self._reading, scheduler.Scheduler, "fuse_nodes", self._fusing)

    def _fusing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fusing(scheduler: Any, nodes: Any) -> Any:
            fused = original(scheduler, nodes)
            with contextlib.suppress(Exception):
                from torch._inductor.virtualized import V

                graph: Any = V.graph
                self._on_kernels(fused, bool(graph.is_backward), graph.orig_gm)
            return fused

        return fusing

    def _on_kernels(self, nodes: Any, backward: bool, gm: Any) -> None:
        launched = []
        for node in nodes:
            if type(node).__name__ == "NopKernelSchedulerNode":
                continue
            ops, written = set(), 0
            for part in node.get_nodes():
                for origin in part.node.get_origins() if part.node is not None else ():
                    place = place_of(origin)
                    if place is not None and origin.op == "call_function":
                        ops.add((op_name(origin), place))
                for buffer in part.get_outputs():
                    with contextlib.suppress(Exception):
                        written += int(buffer.node.get_numel()) * buffer.node.get_dtype().itemsize
            launched.append(Kernel(frozenset(ops), backward, written))
        graph = self._current[-1] if self._current else self._graph_with(launched)
        if graph is not None:
            graph.level = "kernels"
            graph.kernels += launched
            graph.saved += [] if backward else _outputs(gm)

    def _graph_with(self, kernels: list[Kernel]) -> Graph | None:
        """Match a backward, compiled when it first runs, to the forward graph with the same lines."""

        def places(some: list[Kernel]) -> set[Place]:
            return {place for kernel in some for _, place in kernel.ops}

        wanted = places(kernels)
        return max(self._graphs.values(), key=lambda g: len(places(g.kernels) & wanted), default=None)

    def _aot(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def aot(mod: Any, args: Any, fw_compiler: Any, bw_compiler: Any = None, *more: Any, **kw: Any) -> Any:
            # Inductor caches by compiler object, so these are not wrapped; its kernels are read instead.
            if self._current and self._current[-1].backend != "inductor":
                graph = self._current[-1]
                bw_compiler = self._reading_aten(bw_compiler or fw_compiler, graph, True)
                fw_compiler = self._reading_aten(fw_compiler, graph, False)
                if kw.get("inference_compiler") is not None:
                    kw["inference_compiler"] = self._reading_aten(kw["inference_compiler"], graph, False)
            return original(mod, args, fw_compiler, bw_compiler, *more, **kw)

        return aot

    def _reading_aten(self, compiler: Any, graph: Graph, backward: bool) -> Any:
        if not callable(compiler) or not hasattr(compiler, "__code__"):
            return compiler

        def compile_and_read(gm: Any, inputs: Any, **options: Any) -> Any:
            with contextlib.suppress(Exception):
                self._on_aten(gm, graph, backward)
            return compiler(gm, inputs, **options)

        compile_and_read.__dict__.update(compiler.__dict__)
        return compile_and_read

    def _on_aten(self, gm: Any, graph: Graph, backward: bool) -> None:
        graph.level = "ATen calls"
        for node in gm.graph.nodes:
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                continue
            if node.target.is_view:
                continue
            place = place_of(node)
            ops = frozenset({(op_name(node), place)}) if place is not None else frozenset()
            graph.kernels.append(Kernel(ops, backward, _bytes_of(node.meta.get("val"))))
        if not backward:
            graph.saved += _outputs(gm)

    # Results

    @property
    def graphs(self) -> list[Graph]:
        """Return the graph that each frame currently runs."""
        return list(self._graphs.values())

    def runs_per_step(self, graph: Graph) -> float:
        return graph.runs / max(self._steps, 1)

    def interruptions(self) -> list[Interruption]:
        """Return graph breaks and recompilations since reading began, most expensive first."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        if utils is None or not self._began:
            return []
        interruptions = _Interruptions()
        for metric in utils.get_compilation_metrics():
            if (metric.start_time or 0.0) >= self._began:
                interruptions.add_compilation(metric)
        for reason in utils.graph_break_reasons[self._breaks_before :]:
            interruptions.add_break(reason)
        return interruptions.most_expensive_first()


class _Interruptions:
    """Interruptions merged by kind, line and reason."""

    def __init__(self) -> None:
        self._joined: dict[tuple[str, Place, str], Interruption] = {}
        # Seconds that Dynamo spent on the code after a graph break, by the line of the break.
        self._resumed_s: dict[Place, float] = {}

    def add_compilation(self, metric: Any) -> None:
        """One frame that Dynamo compiled, or tried to."""
        file, name = metric.co_filename or "", metric.co_name or ""
        if not _is_shown(file, name):
            return
        seconds = metric.entire_frame_compile_time_s or 0.0
        first_line = metric.co_firstlineno or 0
        if metric.fail_reason is not None:
            place = (metric.fail_user_frame_filename or file, metric.fail_user_frame_lineno or first_line)
            self._add("not compiled", place, metric.fail_reason, seconds)
        elif metric.recompile_reason is not None:
            self._add("recompilation", (file, first_line), metric.recompile_reason, seconds)
        elif resumed := _RESUMED.match(name):
            place = (file, int(resumed[2]))
            self._resumed_s[place] = self._resumed_s.get(place, 0.0) + seconds

    def add_break(self, reason: Any) -> None:
        """Record a graph break; compiling the code after it is charged to the first break on a line."""
        frame = next((f for f in reversed(reason.user_stack) if _is_shown(f.filename, f.name)), None)
        if frame is not None:
            place = (frame.filename, frame.lineno or 0)
            self._add("graph break", place, reason.reason, self._resumed_s.pop(place, 0.0))

    def _add(self, kind: str, place: Place, reason: str, seconds: float) -> None:
        text = first_sentence(reason)
        key = (kind, place, text)
        before = self._joined.get(key)
        if before is None:
            self._joined[key] = Interruption(kind, *place, text, seconds, 1)
        else:
            self._joined[key] = replace(before, seconds=before.seconds + seconds, count=before.count + 1)

    def most_expensive_first(self) -> list[Interruption]:
        return sorted(self._joined.values(), key=lambda one: -one.seconds)


def first_sentence(reason: str) -> str:
    """Shorten Dynamo's multi-line message: the first line says what, and "Explanation:" says why."""
    if reason.startswith("generic_jump"):
        return f"a branch on a tensor's value ({reason})"
    # Recompilations begin with the number of the guarded code, such as "0/0: ".
    reason = re.sub(r"^\d+/\d+: ", "", reason.strip())
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    why = next((line.partition(":")[2].strip() for line in lines if line.startswith("Explanation:")), "")
    what = lines[0] if lines else "no reason given"
    return f"{what}: {why}" if why and why != what else what


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    stack.callback(setattr, owner, name, original)


def _is_shown(file: str, function: str) -> bool:
    return bool(judge_code(file, function) & (LIBRARY | USER))


def place_of(node: Any) -> Place | None:
    """Return the innermost line of a node outside torch."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, int(number)) for file, number, function in frames if _is_shown(file, function)]
    return own[-1] if own else None


def op_name(node: Any) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return getattr(target, "__name__", str(target))


def _bytes_of(value: Any) -> int:
    values = value if isinstance(value, (list, tuple)) else [value]
    total = 0
    for one in values:
        if isinstance(one, torch.Tensor):
            with contextlib.suppress(Exception):
                total += int(one.numel()) * one.element_size()
    return total


def _outputs(gm: Any) -> list[Saved]:
    """Return the tensors that a forward graph computes and returns: results and inputs of its backward."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    saved = []
    for node in output.all_input_nodes:
        place, value = place_of(node), node.meta.get("val")
        if place is not None and isinstance(value, torch.Tensor):
            with contextlib.suppress(Exception):
                saved.append(Saved(place, tuple(int(n) for n in value.shape), _bytes_of(value)))
    return saved


def place_of_line(line: Line) -> Place:
    return line.file, line.number
