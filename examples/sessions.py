"""Many continuations of one text that share its memory: a small search over sessions.

    python examples/sessions.py

A session is a sequence in your hand: append to it, fork it, let it generate, free it. Forks share the memory
of all they have in common, so that trying eight ways costs little more than one. Here each round forks every
kept text twice, lets all of them go on by a few tokens in one batch, and keeps the likeliest.
"""

from pageturner import LLM, SamplingParams

WIDTH, ROUNDS = 4, 3


def main() -> None:
    llm = LLM("smollm2")
    root = llm.session("The three things that every traveller should know about the sea are")
    kept, scores = [root], {id(root): 0.0}
    for number in range(ROUNDS):
        tried = [fork for session in kept for fork in session.fork(2)]
        parents = [session for session in kept for _ in range(2)]
        params = [
            SamplingParams(temperature=0.9, max_tokens=12, logprobs=0, seed=100 * number + i)
            for i in range(len(tried))
        ]
        answers = llm.advance(tried, params)
        for session, parent, answer in zip(tried, parents, answers, strict=True):
            gained = sum(logprob for logprob, _ in answer.logprobs) / max(len(answer.logprobs), 1)
            scores[id(session)] = scores[id(parent)] + gained
        for session in kept:
            session.free()
        tried.sort(key=lambda session: -scores[id(session)])
        kept, dropped = tried[:WIDTH], tried[WIDTH:]
        for session in dropped:
            session.free()
        shared = sum(session.stats["blocks_shared"] for session in kept)
        blocks = sum(session.stats["blocks"] for session in kept)
        print(
            f"round {number + 1}: {len(tried)} tried, {len(kept)} kept, {shared} of {blocks} blocks shared"
        )
    print(llm.tokenizer.decode_whole(kept[0].tokens, skip_special=True))
    for session in kept:
        session.free()


if __name__ == "__main__":
    main()
