"""`log_softmax(model(...).logits).gather(tokens)` of a padded batch becomes `model_logprobs(model, ...)`.

With `head(hidden)` in place of the model call it becomes `masked_token_logprobs(hidden, head, ...)`.
A scoring function calls a transformers model or a head, drops one position of its logits and gathers the
log-probs of the tokens, directly or in functions that it calls. This module follows its statements in order.
The call becomes one of leanstep's, and statements that only used the logits are removed. The mask is the one
that the result is multiplied by, or one that every caller has; in that case the function gets a parameter
for it. The proof decides whether the mask is the right one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import libcst as cst
import torch

from leanstep.fix.source_edits import Edit, NotUnderstood, Repair, Source, Statement, is_plain, keyword

_SAME_VALUES = ("to", "float", "contiguous", "long", "double", "unsqueeze", "squeeze", "clone", "detach")
_LOG_SOFTMAX = ("torch.nn.functional.log_softmax", "torch.log_softmax")
_OWN_MODEL = (
    "the head is not called where its logits are used: by hand, {by_hand} at the head's input, if no caller "
    "needs the logits"
)
_OF_LOG_PROBS = "masked_token_logprobs(hidden, head, tokens, mask)"
_OF_LOSS = "linear_cross_entropy(hidden, head, labels)"
# Masks that do not select the trained tokens.
_OTHER_MASKS = re.compile("atten|attn|pad|prompt|causal", re.IGNORECASE)


@dataclass(frozen=True)
class Output:
    """The model's output."""

    call: cst.Call


@dataclass(frozen=True)
class Logits:
    """Its logits: divided by `temperature`, without the last position if `cut`, only the last `keep`."""

    call: cst.Call
    temperature: str | None = None
    cut: bool = False
    keep: bool = False
    is_log_softmax: bool = False
    # The hidden states, if the call is head(hidden) and not a model's.
    hidden: str | None = None


@dataclass(frozen=True)
class Tokens:
    """Token ids or a mask: the code of the [B, T] tensor, without the first position if `shifted`."""

    code: str
    shifted: bool = False
    last: bool = False


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of `tokens`, gathered from `logits`."""

    logits: Logits
    tokens: Tokens


Value = Output | Logits | Tokens | LogProbs | None


@dataclass
class Scoring:
    """A function that scores tokens, and its statements that do so."""

    source: Source
    function: cst.FunctionDef
    model_statement: Statement
    last_statement: Statement
    log_probs: LogProbs
    functions: set[str] = field(default_factory=set)
    mask: str | None = None


def log_probs_of_tokens(sources: Sequence[Source], source: Source, statement: Statement) -> list[Repair]:
    """Return repairs of a finding about vocabulary-wide tensors; those with a mask first."""
    inside = source.enclosing(statement, cst.FunctionDef)
    if inside is None:
        raise NotUnderstood("no F.cross_entropy(head(h), labels), and no function that gathers log-probs")
    for candidate in sources:
        for function in candidate.all(cst.FunctionDef):
            scoring = _Follower(sources, candidate, function).scoring()
            if scoring is not None and (function is inside or inside.name.value in scoring.functions):
                return _repairs(sources, scoring)
    if not any(_makes_a_transformers_model(each) for each in sources):
        called = {name for each in sources for call in each.all(cst.Call) for name in each.qualified(call)}
        by_loss = "torch.nn.functional.cross_entropy" in called and not called & set(_LOG_SOFTMAX)
        raise NotUnderstood(_OWN_MODEL.format(by_hand=_OF_LOSS if by_loss else _OF_LOG_PROBS))
    raise NotUnderstood("no function that gathers log-probs from the logits of a transformers model")


def _makes_a_transformers_model(source: Source) -> bool:
    names = {name for call in source.all(cst.Call) for name in source.qualified(call)}
    return any(name.startswith("transformers.") and "ForCausalLM" in name for name in names)


class _Follower:
    """Follows the statements of a function and tracks the value of each name."""

    def __init__(self, sources: Sequence[Source], source: Source, function: cst.FunctionDef) -> None:
        self.sources, self.source, self.function = sources, source, function
        self.names: dict[str, Value] = {}
        self.called: set[str] = set()
        self.masks: list[str] = []

    def scoring(self) -> Scoring | None:
        body = self.function.body.body
        candidate = None
        # The statement of each call of a model or a head.
        calling: dict[int, Statement] = {}
        for statement in body:
            if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
                if calling and candidate is None:
                    return None
                continue
            value = self._run(statement.body[0])
            if isinstance(value, (Output, Logits)):
                calling.setdefault(id(value.call), statement)
            if isinstance(value, LogProbs) and candidate is None:
                first = calling.get(id(value.logits.call), statement)
                candidate = Scoring(self.source, self.function, first, statement, value)
        if candidate is None or not candidate.log_probs.logits.cut:
            return None
        candidate.functions, candidate.mask = self.called, (self.masks or [None])[0]
        return candidate

    def _run(self, small: cst.CSTNode) -> Value:
        if isinstance(small, cst.Return) and small.value is not None:
            return self.value(small.value)
        if isinstance(small, cst.Assign) and len(small.targets) == 1:
            target = small.targets[0].target
            if isinstance(target, cst.Name):
                value = self.value(small.value)
                self.names[target.value] = value
                return value
        return None

    def value(self, node: cst.BaseExpression) -> Value:
        """Return the tracked value of an expression, or None if it is unknown."""
        if isinstance(node, cst.Name):
            return self.names.get(node.value, Tokens(node.value))
        if isinstance(node, cst.Attribute):
            value = self.value(node.value)
            if isinstance(value, Output):
                return Logits(value.call) if node.attr.value == "logits" else None
            return Tokens(self.source.text(node)) if is_plain(node) else None
        if isinstance(node, cst.Subscript):
            return self._subscript(node)
        if isinstance(node, cst.BinaryOperation):
            return self._arithmetic(node)
        return self._call(node) if isinstance(node, cst.Call) else None

    def _arithmetic(self, node: cst.BinaryOperation) -> Value:
        """logits / temperature, log_probs * mask."""
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.operator, cst.Divide) and isinstance(left, Logits) and left.temperature is None:
            return replace(left, temperature=self.source.text(node.right))
        if isinstance(node.operator, cst.Multiply) and isinstance(left, LogProbs):
            if isinstance(right, Tokens) and right.shifted:
                self.masks.append(right.code)
            return left
        return None

    def _subscript(self, node: cst.Subscript) -> Value:
        value = self.value(node.value)
        text = self.source.text(node)[len(self.source.text(node.value)) :].replace(" ", "")
        if isinstance(value, Output):
            return Logits(value.call) if text in ('["logits"]', "['logits']", "[0]") else None
        if isinstance(value, Logits):
            if text in ("[:,:-1]", "[:,:-1,:]", "[...,:-1,:]") and not value.cut:
                return replace(value, cut=True)
            # The last tokens: with logits_to_keep the model has already selected them.
            last_positions = re.fullmatch(r"\[(?::|\.\.\.),-[\w.]+:(?:,:)?\]", text)
            return replace(value, keep=True) if last_positions else None
        if isinstance(value, Tokens) and not value.shifted and not value.last:
            if text in ("[:,1:]", "[...,1:]"):
                return replace(value, shifted=True)
            if re.fullmatch(r"\[(?::|\.\.\.),-[\w.]+:\]", text):
                return replace(value, last=True)
            if text == "[:,1:,None]":
                return replace(value, shifted=True)
            if re.fullmatch(r"\[(?:\"\w+\"|'\w+')\]", text):
                return Tokens(self.source.text(node))
        return None

    def _call(self, node: cst.Call) -> Value:
        function, names = node.func, self.source.qualified(node)
        if names & set(_LOG_SOFTMAX) and node.args:
            return _softmaxed(self.value(node.args[0].value))
        if "torch.gather" in names and node.args:
            return self._gathered(self.value(node.args[0].value), node)
        if isinstance(function, cst.Attribute):
            name = function.attr.value
            if name == "forward" and is_plain(function.value):
                return Output(node) if _is_model_call(node) else None
            if name in (*_SAME_VALUES, "log_softmax", "gather"):
                value = self.value(function.value)
                if name == "log_softmax":
                    return _softmaxed(value)
                return self._gathered(value, node) if name == "gather" else value
            return self._head_call(node)
        elif isinstance(function, cst.Name):
            helper = self._helper(function.value)
            if helper is not None:
                return self._followed(*helper, node)
            return Output(node) if _is_model_call(node) else self._head_call(node)
        return None

    def _head_call(self, node: cst.Call) -> Value:
        """head(hidden) or head(hidden[:, :-1]): a plain callable with one argument, no function of torch."""
        function, source = node.func, self.source
        is_method = isinstance(function, cst.Attribute) and hasattr(torch.Tensor, function.attr.value)
        of_library = any(name.startswith(("torch.", "builtins.")) for name in source.qualified(node))
        if len(node.args) != 1 or not is_plain(function) or is_method or of_library:
            return None
        arg, cut = node.args[0], False
        hidden = arg.value
        if isinstance(hidden, cst.Subscript):
            text = source.text(hidden)[len(source.text(hidden.value)) :].replace(" ", "")
            if text not in ("[:,:-1]", "[:,:-1,:]"):
                return None
            hidden, cut = hidden.value, True
        if arg.keyword is not None or arg.star or not is_plain(hidden):
            return None
        return Logits(node, cut=cut, hidden=source.text(hidden))

    def _gathered(self, value: Value, node: cst.Call) -> Value:
        index = keyword(node, "index")
        index_value = index.value if index is not None else node.args[-1].value
        tokens = self.value(index_value)
        if isinstance(value, Logits) and value.is_log_softmax and isinstance(tokens, Tokens):
            return LogProbs(value, tokens)
        return None

    def _helper(self, name: str) -> tuple[Source, cst.FunctionDef] | None:
        for source in (self.source, *self.sources):
            for function in source.module.body:
                if isinstance(function, cst.FunctionDef) and function.name.value == name:
                    return source, function
        return None

    def _followed(self, source: Source, function: cst.FunctionDef, node: cst.Call) -> Value:
        """Return the tracked result of one of the user's functions for these arguments."""
        inner = _Follower(self.sources, source, function)
        parameters = [parameter.name.value for parameter in function.params.params]
        for number, arg in enumerate(node.args):
            name = arg.keyword.value if arg.keyword is not None else (parameters[number:] or [""])[0]
            inner.names[name] = self.value(arg.value)
        if function is self.function or not any(isinstance(v, Logits) for v in inner.names.values()):
            return None
        value: Value = None
        for statement in function.body.body:
            if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
                value = inner._run(statement.body[0])
        self.called |= {function.name.value, *inner.called}
        return value


def _softmaxed(value: Value) -> Value:
    return replace(value, is_log_softmax=True) if isinstance(value, Logits) else None


def _is_model_call(node: cst.Call) -> bool:
    """Return whether the call passes `input_ids` by name."""
    return keyword(node, "input_ids") is not None and not any(arg.star for arg in node.args)


def _repairs(sources: Sequence[Source], scoring: Scoring) -> list[Repair]:
    source, logits, tokens = scoring.source, scoring.log_probs.logits, scoring.log_probs.tokens
    if logits.keep and keyword(logits.call, "logits_to_keep") is None:
        raise NotUnderstood("the last logits are sliced without logits_to_keep")
    if not tokens.shifted and not tokens.last:
        raise NotUnderstood("the tokens are not shifted by one position")
    options = {} if logits.temperature is None else {"temperature": logits.temperature}
    if logits.hidden is not None:
        name, codes = "masked_token_logprobs", [tokens.code]
        if tokens.last:
            raise NotUnderstood("only the last tokens are scored")
    else:
        name, codes, ids = "model_logprobs", [], keyword(logits.call, "input_ids")
        assert ids is not None
        if source.text(ids.value) != tokens.code:
            options["targets"] = tokens.code
    if not _known_before(scoring, [*options.values(), *codes, scoring.mask or ""]):
        raise NotUnderstood("the mask, the labels or the temperature are computed after the model call")
    imports = source.import_line(name)
    title = f"log-probs without the logits: {name}"
    repairs = []
    if scoring.mask is not None:
        body = _edited_body(scoring, {"mask": scoring.mask, **options})
        repairs.append(Repair(f"{title} of the tokens in {scoring.mask}", (*body, *imports)))
    else:
        parameter = "token_mask" if source.uses("mask", scoring.function) else "mask"
        passed = _passed_masks(sources, scoring, parameter)
        if passed:
            body = _edited_body(scoring, {"mask": parameter, **options})
            repairs.append(Repair(f"{title}, with a mask from its callers", (*passed, *body, *imports)))
    if "targets" not in options:
        # Labels may be -100 outside the mask.
        repairs.append(Repair(f"{title} of all tokens", (*_edited_body(scoring, options), *imports)))
    return repairs


def _known_before(scoring: Scoring, codes: Sequence[str]) -> bool:
    """Return whether the names in these expressions are set at the model call and unchanged after it."""
    source, function = scoring.source, scoring.function
    body, first = source.block_of(scoring.model_statement)
    for name in {root for code in codes for root in re.findall(r"^[A-Za-z_]\w*", code)}:
        before = any(source.is_stored(use) for use in source.uses(name, function.params))
        before = before or any(source.is_changed(name, part) for part in body[:first])
        # A constant of the module.
        before = before or not any(source.is_stored(use) for use in source.uses(name, function))
        stored_later = any(source.is_stored(use) for part in body[first:] for use in source.uses(name, part))
        if not before or stored_later:
            return False
    return True


def _edited_body(scoring: Scoring, options: dict[str, str]) -> list[Edit]:
    """Return the edits that rewrite the model call and remove statements that only used the logits."""
    source, logits = scoring.source, scoring.log_probs.logits
    call = logits.call
    extras = "".join(f", {name}={code}" for name, code in options.items())
    if logits.hidden is not None:
        inputs = f"{logits.hidden}, {source.text(call.func)}, {scoring.log_probs.tokens.code}"
        new_call = f"masked_token_logprobs({inputs}{extras})"
    else:
        model = call.func
        if isinstance(model, cst.Attribute) and model.attr.value == "forward":
            model = model.value
        arguments = source.text(call)[len(source.text(call.func)) + 1 :]
        gap = "" if arguments[:1] in "\r\n" else " "
        new_call = f"model_logprobs({source.text(model)}{extras},{gap}{arguments}"
    body, first = source.block_of(scoring.model_statement)
    last = next(i for i, part in enumerate(body) if part is scoring.last_statement)
    final = source.only_one(scoring.last_statement, cst.BaseSmallStatement)
    assign = isinstance(final, cst.Assign)
    result = source.text(final.targets[0].target) if assign else source.fresh("log_probs")  # type: ignore[union-attr]
    live = {name.value for later in body[last + 1 :] for name in source.all(cst.Name, later)} - {result}
    deleted = []
    for statement in reversed(body[first + 1 : last]):
        names = {name.value for name in source.all(cst.Name, statement)}
        stored = _stored_name(statement)
        if stored is None and not _is_text(statement):
            live |= names
        elif stored is not None and stored not in live:
            deleted.append(statement)
        elif stored is not None:
            live = (live - {stored}) | names
    if result in live:
        raise NotUnderstood(f"{result} is used between the model call and the log-probs")
    logits_name = _stored_name(scoring.model_statement)
    if logits_name in live:
        raise NotUnderstood(
            f"{logits_name} is used for more than the log-probs: {_OF_LOG_PROBS} by hand, also with entropy="
        )
    if any(_writes(source, statement) for statement in deleted):
        raise NotUnderstood("the logits are changed in place before the log-probs")
    if not assign and len(deleted) == last - first - 1:
        start = f"return {new_call}"
        deleted.append(scoring.last_statement)
        ending = []
    else:
        start = f"{result} = {new_call}"
        if assign:
            deleted.append(scoring.last_statement)
            ending = []
        else:
            ending = [source.replace(scoring.last_statement, f"return {result}")]
    if scoring.last_statement is scoring.model_statement:
        raise NotUnderstood("the log-probs are computed in a single expression")
    edits = [source.delete_with_comments(statement) for statement in deleted]
    small = source.only_one(scoring.model_statement, cst.BaseSmallStatement)
    return [source.replace(small, start), *edits, *ending]


def _writes(source: Source, statement: Statement) -> bool:
    """Return whether a statement writes into a tensor: it must not disappear."""
    calls = [source.text(call.func).rpartition(".")[2] for call in source.all(cst.Call, statement)]
    return any(name.endswith("_") and not name.endswith("__") for name in calls)


def _stored_name(statement: Statement) -> str | None:
    """Return x from `x = ...`."""
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        small = statement.body[0]
        if isinstance(small, cst.Assign) and len(small.targets) == 1:
            target = small.targets[0].target
            return target.value if isinstance(target, cst.Name) else None
    return None


def _is_text(statement: Statement) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and all(
        isinstance(part, cst.Expr) and isinstance(part.value, cst.SimpleString) for part in statement.body
    )


def _passed_masks(sources: Sequence[Source], scoring: Scoring, parameter: str) -> list[Edit]:
    """Add a mask parameter and pass it at every call; empty if a caller has no mask."""
    function, parameters = scoring.function, scoring.function.params
    if not parameters.params or parameters.star_kwarg is not None or parameters.kwonly_params:
        return []
    last = parameters.params[-1]
    end = last.default or (last.annotation.annotation if last.annotation is not None else last.name)
    edits = [scoring.source.insert_after(end, f", {parameter}=None")]
    for source in sources:
        for call in source.all(cst.Call):
            if not isinstance(call.func, cst.Name) or call.func.value != function.name.value:
                continue
            mask = _mask_at(sources, source, call)
            if mask is None or not call.args or any(arg.star for arg in call.args):
                return []
            edits.append(source.insert_after(call.args[-1], f", {parameter}={mask}"))
    return edits if len(edits) > 1 else []


def _mask_at(sources: Sequence[Source], source: Source, call: cst.Call) -> str | None:
    """Return a token mask in the caller: a field of the same object as its arguments, or a variable."""
    for arg in call.args:
        if isinstance(arg.value, cst.Attribute) and isinstance(arg.value.value, cst.Name):
            fields = sorted(_mask_fields(sources))
            return f"{arg.value.value.value}.{fields[0]}" if len(fields) == 1 else None
    scope = source.enclosing(call, cst.FunctionDef)
    if scope is None:
        return None
    before = source.span(call)[0]
    names = {
        name.value
        for name in source.all(cst.Name, scope)
        if source.is_stored(name) and source.span(name)[0] < before and _is_mask(name.value)
    }
    return names.pop() if len(names) == 1 else None


def _mask_fields(sources: Sequence[Source]) -> set[str]:
    """Return fields of the user's classes whose names say that they are token masks."""
    return {
        target.target.value
        for source in sources
        for owner in source.all(cst.ClassDef)
        for target in source.all(cst.AnnAssign, owner)
        if isinstance(target.target, cst.Name) and _is_mask(target.target.value)
    }


def _is_mask(name: str) -> bool:
    return "mask" in name and _OTHER_MASKS.search(name) is None
