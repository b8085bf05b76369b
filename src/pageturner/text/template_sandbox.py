"""The sandbox in which chat templates run: what they may call, and how much they may do.

Owns the budget of a rendering. Each round of a loop and each call is a step; each text and list
that is made is paid for by its length, before it is made where that can be told. Must not know what
a conversation is, tokens, or HTTP. jinja2 is imported here, so whoever needs no template does not
import this module.

Two things cost nothing here and are bounded only by the size of what a template can make: comparing
two values and looking for one in another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

MAX_BITS = 1 << 16  # of a number that a template computes
WIDEST_INDENT = 32  # of tojson
# for HTML, and with regular expressions whose time grows with the square of a text
_LEFT_OUT = ("urlize", "xmlattr", "wordwrap", "striptags", "pprint")
_FREE = frozenset({"length", "count", "first", "last", "default", "d", "items"})
_OF_LISTS = frozenset(
    {
        "batch",
        "dictsort",
        "groupby",
        "list",
        "map",
        "max",
        "min",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sort",
        "unique",
        "attr",
    }
)
_SIZED = frozenset({"center", "batch", "slice", "truncate", "indent"})  # whose numbers are sizes
_SIZED_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "to_bytes"})
_COPYING = frozenset({"copy", "count", "index"})
_CHANGING = frozenset({"append", "extend", "insert", "pop", "update"})
# of `%` and of str.format: a width or precision of five digits or more, or one that is itself an
# argument
_WIDE = re.compile(r"\d{5,}|%(?:\(.*?\))?[^%a-zA-Z\s]*\*|:[^{}]*\{", re.DOTALL)


class OverBudget(jinja2.TemplateError):
    """The template has not ended within its budget."""


@dataclass(slots=True)
class Budget:
    """The rest of the limits of one rendering: rounds of loops, calls and elements of lists, and
    characters."""

    steps: int
    characters: int

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            raise OverBudget("it did not end within its budget of loops and calls")

    def make(self, length: int) -> None:
        self.characters -= length
        if self.characters < 0:
            raise OverBudget("it did not end within its budget of text")

    def pay(self, value: Any) -> None:
        """Pay for something that is gone through once: its length, not what it holds."""
        if isinstance(value, str | bytes):
            self.make(len(value))
        elif isinstance(value, list | tuple | Mapping | range | MappingView):
            self.step(len(value))


_budget: ContextVar[Budget] = ContextVar("budget")


def spending(budget: Budget, work: Callable[[], Any]) -> Any:
    """Do it with this budget."""
    before = _budget.set(budget)
    try:
        return work()
    finally:
        _budget.reset(before)


# -- what a template's code calls ------------------------------------------------------------------
class _Counted:
    """A sequence that a loop goes through; each round is a step."""

    def __init__(self, rounds: Iterable[Any]) -> None:
        self._rounds = rounds

    def __len__(self) -> int:
        return len(self._rounds)  # type: ignore[arg-type]  # TypeError, as of what it stands for

    def __iter__(self) -> Iterator[Any]:
        return map(_counted, iter(self._rounds))


def _counted(value: Any) -> Any:
    _budget.get().step()
    return value


def _measured(value: Any) -> Any:
    """The value. Paid for with all that is in it, as often as it is in there: so much is written of
    it."""
    if not isinstance(value, list | tuple | Mapping | set | frozenset | MappingView | Namespace):
        return value
    budget, left = _budget.get(), [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            budget.make(len(one))
        elif isinstance(one, Mapping):
            budget.step(len(one))
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset | MappingView):
            budget.step(len(one))
            left += one  # type: ignore[arg-type]  # views of a dict are iterable
        elif isinstance(one, Namespace):  # which keeps its attributes out of reach
            held = object.__getattribute__(one, "_Namespace__attrs")
            budget.step()
            left.append(held)
    return value


def _joined(values: Iterable[Any], between: str = "") -> str:
    """The texts of the values. Each is paid for before all are put together."""
    texts = (str(_measured(value)) for value in values)
    return between.join([*_paid(texts, len(between))])


def _concat(pieces: Iterable[str]) -> str:
    """The text that a template, a macro or a block has written."""
    budget, kept = _budget.get(), []
    for piece in pieces:
        budget.make(len(piece))
        kept.append(piece)
    return "".join(kept)


class _OwnList(list[Any]):
    """A list that a template has written: this one it may change."""


class _OwnDict(dict[Any, Any]):
    """A dict that a template has written: this one it may change."""


def _own(value: Any) -> Any:
    kinds: dict[type, type] = {list: _OwnList, dict: _OwnDict}
    return kinds.get(type(value), type(value))(_measured(value))


class _CountingCode(CodeGenerator):
    """Code that counts: loops, `~`, and lists, tuples and dicts that hold others."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for loop in [*node.find_all(nodes.For)]:
            counted = nodes.EnvironmentAttribute("counted")
            loop.iter = nodes.Call(counted, [loop.iter], [], None, None).set_lineno(loop.lineno)
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._measure(super().visit_List, node, frame)

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, list | dict):
            self._measure(super().visit_Const, node, frame)
        else:
            super().visit_Const(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._measure(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._measure(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _measure(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.own(")
        visit(node, frame)
        self.write(")")


class _GenerationBlock(ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class TemplateEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with a budget. Compile and render in it only by way of `spending`."""

    code_generator_class = _CountingCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_concat)
    counted = staticmethod(_Counted)
    joined = staticmethod(_joined)
    own = staticmethod(_own)

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", _GenerationBlock]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_measured
        )
        for name in _LEFT_OUT:
            del self.filters[name]
        self.filters = {name: _paying(name, one) for name, one in self.filters.items()}
        self.filters |= {"tojson": _tojson, "join": _join, "sum": _sum}
        del self.globals["lipsum"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        own = isinstance(obj, _OwnList | _OwnDict) and attr in _CHANGING
        return own or super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __called: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if isinstance(__called, LoopContext) and args:  # loop(children) of a recursive loop
            args = (_Counted(args[0]), *args[1:])
        elif __called is dict:
            _measured([*args, *kwargs.values()])
        else:
            method = getattr(__called, "__wrapped__", __called)  # str.format comes wrapped
            own, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
            if isinstance(own, str | bytes) and name == "join" and len(args) == 1:
                args = ([*_paid(args[0], len(own))],)
            elif isinstance(own, str | bytes | int):
                _pay_for_method(budget, own, name, args)
            elif isinstance(own, list | tuple | dict) and name in _COPYING | _CHANGING:
                budget.pay(own)
                _measured([*args, *kwargs.values()])
        return super().call(__context, __called, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        if operator == "+":
            budget.pay(left)
            budget.pay(right)
        elif operator == "%" and isinstance(left, str | bytes):
            _pay_for_format(budget, left, right)
        elif operator == "*":
            _pay_for_product(budget, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_number(left.bit_length() * abs(right))
        return super().call_binop(context, operator, left, right)


# -- prices ----------------------------------------------------------------------------------------
def _paid(values: Iterable[Any], between: int) -> Iterator[Any]:
    """The values, each paid for as it is taken."""
    budget = _budget.get()
    for value in values:
        budget.step()
        budget.make(between + (len(value) if isinstance(value, str | bytes) else 0))
        yield value


def _pay_for_product(budget: Budget, left: Any, right: Any) -> None:
    for whole, times in ((left, right), (right, left)):
        if isinstance(whole, str | bytes | list | tuple) and isinstance(times, int):
            _measured(whole)
            budget.make(len(whole) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_number(left.bit_length() + right.bit_length())


def _check_number(bits: int) -> None:
    if bits > MAX_BITS:
        raise OverBudget(f"a number in it has more than {MAX_BITS} bits")


def _pay_for_format(budget: Budget, text: str | bytes, values: Any) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise OverBudget("a width within a format is too large, or not a number")
    budget.make(len(text))
    _measured(values)


def _pay_for_method(budget: Budget, own: str | bytes | int, name: str, args: Sequence[Any]) -> None:
    """Pay for a method of a text or a number, by its arguments."""
    for one in args:
        budget.pay(one)
    if name in _SIZED_METHODS:
        budget.make(sum(abs(one) for one in args if isinstance(one, int)))
    if isinstance(own, int):
        return
    budget.make(len(own))
    if name == "replace" and len(args) >= 2 and isinstance(own, str):
        budget.make(own.count(str(args[0])) * len(str(args[1])))
    elif name == "expandtabs":
        budget.make(len(own) * max((one for one in args if isinstance(one, int)), default=8))
    elif name in ("format", "format_map"):
        _pay_for_format(budget, own, [*args])
    elif name == "translate":
        raise OverBudget("translate is not there")


def _paying(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, paid for by its arguments."""
    if name in _FREE:
        return filter
    # what jinja2 puts in front
    own = 1 if getattr(filter, "jinja_pass_arg", None) is not None else 0

    @wraps(filter)  # and how it is to be called: jinja2 keeps that in an attribute
    def paid(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        given = [*args[own:], *kwargs.values()]
        for value in given:
            budget.pay(value) if name in _OF_LISTS or isinstance(value, str) else _measured(value)
        if name in _SIZED:
            budget.make(sum(abs(value) for value in given if isinstance(value, int)))
        texts = [value for value in given if isinstance(value, str)]
        if name == "indent" and texts:  # of every line
            width = (
                len(texts[1])
                if len(texts) > 1
                else max((v for v in given if type(v) is int), default=4)
            )
            budget.make((texts[0].count("\n") + 1) * width)
        if name == "replace" and len(texts) >= 3:
            budget.make(texts[0].count(texts[1]) * len(texts[2]))
        if name == "format" and texts:
            _pay_for_format(budget, texts[0], given[1:])
        return filter(*args, **kwargs)

    return paid


@jinja2.pass_environment
def _join(environment: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    """jinja2's filter, paid for piece by piece."""
    values = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return _joined(values, str(d))


@jinja2.pass_environment
def _sum(environment: Any, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """jinja2's filter, by the `+` that is paid for."""
    values = (
        iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable)
    )
    for value in _Counted(values):
        start = environment.call_binop(None, "+", start, value)
    return start


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escaping, as templates expect it (jinja2's own filter escapes)."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > WIDEST_INDENT:
        raise OverBudget(f"tojson can indent by {WIDEST_INDENT} at most")
    if isinstance(value, Iterator):  # of `map` and its like, which other engines take here as lists
        value = [*_Counted(value)]
    text = json.dumps(
        _measured(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    _budget.get().make(len(text))
    return text
