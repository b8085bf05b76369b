"""Chat templates end: whatever they do, within a budget. What real ones do comes out as jinja2 has it."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import sandbox

from pageturner.text.chat_template import ChatTemplate, TemplateLimits, TemplateTooLong
from support.refusals import client_error

HI = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a\nb"}]
LIMITS = TemplateLimits(steps=20_000, characters=1 << 20, prompt=1 << 20)
DOUBLED = (
    "{% set ns = namespace(x=X) %}{% for i in range(64) %}{% set ns.x = Y %}{% endfor %}{{ ns.x }}"
)


def doubled(first: str, next: str) -> str:
    return DOUBLED.replace("X", first).replace("Y", next)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if false %}{% endfor %}{% for i in range(99999) if i < 0 %}{% endfor %}",
        "{% for i in [9] recursive %}{% if i %}{{ loop([i - 1] * 9) }}{% endif %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% for i in range(9999) %}{% set x = range(99999) | sum %}{% endfor %}",
        "{% for i in range(9999) %}{% set x = range(99999) | list %}{% endfor %}",
        doubled("'ab'", "ns.x ~ ns.x"),
        doubled("'ab'", "ns.x + ns.x"),
        doubled("'ab'", "ns.x * 2"),
        doubled("[1]", "ns.x + ns.x"),
        doubled("[1]", "[ns.x, ns.x]"),
        doubled("[1]", "(ns.x, ns.x)"),
        doubled("[1]", "{'a': ns.x, 'b': ns.x}"),
        doubled("[1]", "dict(a=ns.x, b=ns.x)"),
        doubled("[1]", "[ns.x] * 2"),
        doubled("'ab'", "ns.x | replace('a', 'aa')"),
        doubled("'ab'", "ns.x.replace('a', 'aa')"),
        doubled("'ab'", "[ns.x, ns.x] | join"),
        doubled("'ab'", "''.join([ns.x, ns.x])"),
        doubled("'ab'", "'%s%s' % (ns.x, ns.x)"),
        doubled("'ab'", "'{0}{0}'.format(ns.x)"),
        doubled("'ab'", "'%s%s' | format(ns.x, ns.x)"),
        doubled("7", "ns.x * ns.x"),
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x'.center(10 ** 9) }}{{ 'x'.zfill(10 ** 9) }}",
        "{{ '\t'.expandtabs(10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%(a)1000000000d' | format(a=1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 9) }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ ('\n' * 9999) | indent(9999) }}",
        "{{ [1] | batch(10 ** 9, 'x') | list }}",
        "{{ [1] | slice(10 ** 9) | list }}",
        "{{ (range(9999) | list) | join('x' * 9999) }}",
        "{{ ('x' * 99999).join(range(9999) | map('string')) }}",
        "{{ 'aaaaaaaaaaaaaaaaaaaa'.translate({97: 'x' * 99999}) }}",
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}",
        "{% for i in range(999) %}{% set ns = namespace(t='x' * 9999) %}{{ ns.t }}{% endfor %}",
    ],
)
def test_a_template_ends_within_its_budget(source: str) -> None:
    with pytest.raises(TemplateTooLong) as caught:
        ChatTemplate(source, limits=LIMITS).render(HI)
    assert (caught.value.status, caught.value.code) == (400, "template_error")
    assert "too much work" in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10 ** 5000 }}",
        "{{ " + "9" * 5000 + " }}",
        "{{ \ud800 }}",
        "{% for a in b %}" * 40 + "{% endfor %}" * 40,
        "{{ " + "(" * 9999 + ")" * 9999 + " }}",
        "{{ lipsum(n=99) }}",
        "{{ 'x' | urlize }}",
        "{{ range(10 ** 9) }}",
        "{{ [1, 'a'] | sort }}",
    ],
)
def test_what_cannot_be_read_or_rendered_is_a_refusal(source: str) -> None:
    with client_error(status=400, code="template_error") as caught:
        ChatTemplate(source, limits=LIMITS).render(HI)
    assert caught.value.message.encode()


def test_a_long_conversation_has_a_larger_budget() -> None:
    source = (
        "{% for m in messages %}{{ '<' + m.role + '>' + (m.content | trim) ~ '\\n' }}{% endfor %}"
    )
    long = [{"role": "user", "content": "x" * (3 << 20)}]
    assert ChatTemplate(source).render(long) == "<user>" + "x" * (3 << 20) + "\n"


def test_a_prompt_has_a_largest_length() -> None:
    limits = TemplateLimits(prompt=100)
    with pytest.raises(TemplateTooLong, match="a prompt of 101 characters"):
        ChatTemplate("{{ 'x' * 101 }}", limits=limits).render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.last }} "
        "{{ loop.previtem }};{% endfor %}",
        "{% for m in messages %}{{ loop.nextitem.role if not loop.last }}{% else %}none{% endfor %}",
        "{% for m in [] %}x{% else %}none{% endfor %}{% for c in 'abc' if c != 'b' %}{{ c }}{% endfor %}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% endfor %}{% for x in nothing %}{% endfor %}",
        "{% for m in [[1, [2]], [3]] recursive %}{{ loop.depth }}"
        "{% if m is iterable %}{{ loop(m) }}{% endif %}"
        "{% endfor %}",
        "{{ 'a' ~ 1 ~ none ~ [1, 'b'] ~ {'c': 2} ~ (1,) }}{{ messages }}{{ messages[0] | string }}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ messages | join('|', attribute='content') }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ [1, 2] | sum }}",
        "{{ messages | sum(attribute='n', start=3) if false else [0.5, 1] | sum }}"
        "{{ [[1], [2]] | sum(start=[]) }}",
        "{% macro m(x, y='d') %}<{{ x }}{{ y }}{{ caller() if caller }}>{% endmacro %}{{ m(1) }}"
        "{% call m(2, y=3) %}in{% endcall %}",
        "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}"
        "{% endfor %}{{ ns.n }}{{ ns.found }}",
        "{{ '%s and %05.1f%%' % ('a', 2.5) }}{{ '{:>5}|{}'.format('a', 1) }}{{ '%s' | format(3) }}",
        "{{ 7 ** 2 }}{{ 7 % 3 }}{{ 2 * 'ab' }}{{ [1] * 2 }}{{ (1, 2) + (3,) }}{{ 1.5 * 2 }}{{ -3 // 2 }}",
        "{{ messages[0].content[1:3] }}{{ messages[::-1][0].role }}{{ 'a,b'.split(',')[-1] }}",
        "{{ 'x'.join(['a', 'b']) }}{{ 'abab'.replace('a', 'c', 1) }}{{ ' a ' | trim }}"
        "{{ 'ab' | indent(2, true) }}",
        "{% set x %}block {{ 1 }}{% endset %}{{ x }}{% filter upper %}up"
        "{% endfilter %}{{ nothing }}{{ none }}",
        "{{ messages | length }}{{ messages | first }}{{ 'a' | default('b') }}"
        "{{ nothing | d('b') }}{{ true }}",
        "{% if 'user' in messages | map(attribute='role') %}yes{% endif %}"
        "{{ dict(a=1) }}{{ [1, 2] | reverse | list }}",
        "{% for a in range(3) %}{% if a == 1 %}{% continue %}{% endif %}{{ a }}"
        "{{ cycler('x', 'y').next() }}{% endfor %}",
        "{{ messages | groupby('role') }}{{ [3, 1] | sort }}"
        "{{ [1, 2, 3] | batch(2) | list }}{{ 'ab' | list }}",
    ],
)
def test_what_comes_out_is_what_jinja2_makes(source: str) -> None:
    plain = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    given: dict[str, Any] = {
        "tools": None,
        "bos_token": "",
        "eos_token": "",
        "add_generation_prompt": True,
    }
    expected = plain.from_string(source).render(messages=HI, **given)
    assert ChatTemplate(source, limits=LIMITS).render(HI) == expected


def test_what_a_filter_makes_is_written_as_a_list() -> None:
    template = ChatTemplate("{{ messages | map(attribute='content') | tojson }}")
    assert template.render([{"content": "a"}, {"content": "b"}]) == '["a", "b"]'
