"""Which replica of a Serve deployment gets a request."""

from __future__ import annotations

from pageturner.router.load_balancer import FIRST_GUESS
from pageturner.router.ray.choice import Ask, Choice, choice_of

A, B, C = "replica-a", "replica-b", "replica-c"
LONG = tuple(bytes([i]) for i in range(32))  # digests of 32 chunks


def ask(
    number: int, prefix: tuple[bytes, ...] = (), most: int = 0, avoid: tuple[str, ...] = ()
) -> Ask:
    return Ask(number, "POST", "/v1/completions", [], b"{}", prefix, most, avoid)


def choice(*ids: str) -> Choice:
    made = Choice()
    made.set_up("prefix_aware", 1000)
    made.update(ids)
    return made


def test_what_begins_alike_goes_to_one_replica_and_the_rest_elsewhere() -> None:
    one = choice(A, B)
    first = one.order(ask(1, LONG), [A, B])[0]
    one.began(ask(1, LONG), first)
    one.ended(1)
    assert {one.order(ask(n, LONG), [A, B])[0] for n in range(2, 8)} == {first}
    one.began(ask(8, LONG, most=int(FIRST_GUESS)), first)
    other = one.order(ask(9, (b"other",)), [A, B])[0]
    assert other != first
    assert one.placed == {"where_known": 1, "elsewhere": 1}


def test_a_load_is_what_answers_are_expected_to_cost_not_how_many_there_are() -> None:
    one = choice(A, B)
    for number in range(4):
        one.began(ask(number, most=8), A)  # four short ones
    one.began(ask(10, LONG, most=1000), B)  # a long prompt and a long answer
    assert one.replicas[B].tokens.tokens > one.replicas[A].tokens.tokens
    assert one.order(ask(11), [A, B]) == [A, B]


def test_what_answers_lately_had_is_expected_of_the_next() -> None:
    one = choice(A)
    for number in range(60):
        one.began(ask(number), A)
        one.ended(number)
        one.forget(number, tokens=1000)
    assert 900 < one.balancer.answer_tokens <= 1000
    one.began(ask(100), A)
    one.began(ask(101, most=5), A)
    assert one.attempts[100].share[1] > 900
    assert one.attempts[101].share[1] == 6


def test_who_failed_is_asked_last() -> None:
    one = choice(A, B, C)
    assert one.order(ask(1, avoid=(A, B)), [A, B, C])[0] == C
    assert set(one.order(ask(1, avoid=(A, B, C)), [A, B, C])) == {A, B, C}, (
        "rather again than not at all"
    )


def test_replicas_come_and_go() -> None:
    one = choice(A, B)
    one.began(ask(1, LONG), A)
    assert one.where(1) == A
    one.update([B, C])
    one.ended(1)
    assert one.where(1) == A, "who failed is known until the next one is asked"
    one.forget(1)
    assert one.where(1) == ""
    assert set(one.replicas) == {B, C}
    assert one.order(ask(2, LONG), [B, C])[0] in (B, C)
    one.update([A, B, C])
    assert one.replicas[A].tokens.tokens == 0, "one of the same name begins with nothing"
    assert one.order(ask(3), ["nobody"]) == ["nobody"]


def test_requests_of_other_doors_count() -> None:
    one = choice(A, B)
    one.told(A, said=1, active=7)
    assert one.order(ask(1), [A, B])[0] == B
    one.told(A, said=1, active=0)  # said before
    assert one.replicas[A].others == 7
    one.told(A, said=2, active=0)
    assert one.replicas[A].others == 0


def test_there_is_one_for_a_process() -> None:
    assert choice_of("some model") is choice_of("some model")
    assert choice_of("some model") is not choice_of("another")


def test_an_attempt_that_serve_gives_to_another_one_is_at_one_place() -> None:
    one = choice(A, B)
    one.began(ask(1, LONG), A)
    one.began(ask(1, LONG), B)
    assert (one.replicas[A].tokens.tokens, one.replicas[A].open) == (0, 0)
    assert one.replicas[B].open == 1
    one.ended(1)
    one.ended(1)
    assert (one.replicas[B].tokens.tokens, one.replicas[B].open) == (0, 0)
