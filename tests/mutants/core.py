"""Seeded bugs of core/: each is one textual change of a module. `MUTANTS` maps a name to (module, old, new).

A change that no longer fits the source is an error, so a mutant cannot silently become no mutant.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pageturner.core import blocks
from pageturner.policies import scheduler_factory as assembly

MODULES = (
    "store", "blocks", "group", "book", "audit", "sharing", "advance", "pace", "predict", "admission",
    "batching", "fairness", "order", "scheduler", "build", "targets",
)  # fmt: skip

MUTANTS: dict[str, tuple[str, str, str]] = {
    # -- copy-on-write and reference counts
    "copy-on-write skipped": (
        "store",
        "return [i for i in range(first, min(end, len(table))) if refs[table[i]] > 1]",
        "return []",
    ),
    "copy-on-write skipped for the next token": (
        "blocks",
        " and self.whole.refs[seq.blocks[first]] == 1\n",
        "\n",
    ),
    "copy not handed to the plan": ("store", "self.copies.append((source, table[i]))", "pass"),
    "source of a copy given out in the same plan": (
        "store",
        "            self._sources.add(source)\n",
        "",
    ),
    "copies made again by the next plan": (
        "store",
        "        self.copies = []\n        self._s",
        "        self._s",
    ),
    "fork without references": (
        "blocks",
        "        for store, table in self._tables(dst):\n            store.share(table)\n",
        "",
    ),
    "a prompt lent before it is there": (
        "blocks",
        "source.computed <= last:",
        "source.computed < last // 2:",
    ),
    "the last token of a lent prompt": (
        "blocks",
        "seq.computed = seq.prompt_len - 1",
        "seq.computed = seq.prompt_len",
    ),
    "a lent block sealed too early": (
        "blocks",
        "min(source.sealed, seq.computed //",
        "min(source.sealed, seq.prompt_len //",
    ),
    "reference count off by one": ("store", "self.refs[block] = 1\n", "self.refs[block] = 2\n"),
    "attach without references": (
        "blocks",
        "        for store, table in self._tables(seq):\n            store.share(table)\n",
        "",
    ),
    "refused extend keeps what it took": (
        "blocks",
        "> store.available for store, table in tables):\n            return False\n",
        "> store.available for store, table in tables):\n"
        "            if self.whole._empty:\n"
        "                seq.blocks.append(self.whole._take())\n"
        "            return False\n",
    ),
    "refused extend when only one store is full": ("blocks", "if any(store.lacks", "if all(store.lacks"),
    "shared cached block stays in the free list": (
        "store",
        "                if self.refs[block] == 0:\n                    del self._cached[block]\n",
        "",
    ),
    # -- prefix index
    "sealed before computed": (
        "blocks",
        "while (seq.sealed + 1) * size <= seq.computed:",
        "while (seq.sealed + 1) * size <= len(seq.tokens) and seq.sealed < len(seq.blocks):",
    ),
    "match ignores the parent": (
        "blocks",
        "            parent = self.whole.uids[block]\n            run",
        "            run",
    ),
    "keys ignore the parent": (
        "blocks",
        "return self.whole.uids[seq.blocks[place - 1]]",
        "return (seq.request.adapter, seq.request.salt)",
    ),
    "salt ignored": (
        "blocks",
        "else seq.request.adapter, seq.request.salt)",
        "else seq.request.adapter, '')",
    ),
    "what is not pinned is everybody's": (
        "blocks",
        "if block is None or block not in self.public:",
        "if block is None:",
    ),
    "behind a public block all are alike": (
        "blocks",
        "if place == seq.public:",
        "if place == 0:",
    ),
    "released head first": ("store", "self.drop(table.pop())", "self.drop(table.pop(0))"),
    "eviction leaves the key": ("store", "            del self.index[self.keys[block]]\n", ""),
    "attach gives all tokens": (
        "blocks",
        "last, stop = len(seq.tokens) - 1,",
        "last, stop = len(seq.tokens),",
    ),
    "attach past logits_from": ("blocks", "last if stop is None else min(last, stop)", "last"),
    "stale blocks after preemption": (
        "blocks",
        "        seq.computed = seq.sealed = seq.public = seq.gone = 0\n",
        "",
    ),
    "trim missing": ("blocks", "                store.cut(table, keep)\n", "                pass\n"),
    "equal block not referenced": ("store", "            self.share([equal])\n", ""),
    # -- windows
    "one block too many given back": (
        "blocks",
        "return max(0, position + 1 - self.window) //",
        "return max(0, position + 1 - self.window + self.block_size) //",
    ),
    "one position too few seen": ("blocks", "position + 1 - self.window)", "position + 2 - self.window)"),
    "nothing given back": (
        "blocks",
        "            for i in range(seq.gone, first):\n",
        "            for i in ():\n",
    ),
    "given back but still in the table": ("blocks", "                seq.recent[i] = GONE\n", ""),
    "given back too early, before it is sealed": (
        "scheduler",
        "            self._counters.recomputed_tokens += move(seq, seq.computed + n)\n"
        "            self._pool.seal(seq)\n            self._pool.trim(seq)\n",
        "            self._counters.recomputed_tokens += move(seq, seq.computed + n)\n"
        "            self._pool.trim(seq)\n            self._pool.seal(seq)\n",
    ),
    "not given back while prefilling": (
        "scheduler",
        "            self._pool.trim(seq)\n            return news",
        "            return news",
    ),
    "recent blocks not promised": (
        "blocks",
        "return whole, max(most, len(seq.recent) - seq.gone)",
        "return whole, 0",
    ),
    "a step longer than the recent blocks": (
        "scheduler",
        "n = min(n, seq.pending, self._pool.longest(seq.computed))\n",
        "n = min(n, seq.pending)\n",
    ),
    # -- scheduler
    "lost token at commit": ("scheduler", "seq.tokens += tokens\n", "seq.tokens += tokens[:-1] or tokens\n"),
    "rejected drafts count as computed": (
        "scheduler",
        "self._counters.recomputed_tokens += move(seq, len(seq.tokens) - 1)\n",
        "self._counters.recomputed_tokens += move(seq, seq.computed + n)\n",
    ),
    "draft kept over a preemption": (
        "scheduler",
        "            one.draft = []\n            one.state",
        "            one.state",
    ),
    "draft past the end of the sequence": (
        "scheduler",
        "draft[: min(self._max_draft, seq.limit - len(seq.tokens) - 1)]",
        "draft[: self._max_draft]",
    ),
    "prompt logprobs repeated after a preemption": (
        "scheduler",
        "            seq.scored = scored.stop\n",
        "            pass\n",
    ),
    "stop id ignored": ("advance", "if token in params.stop_ids and", "if False and"),
    "min_tokens ignored": ("advance", ">= params.min_tokens", ">= 0"),
    "one token too many": ("advance", "if length >= limit:", "if length > limit:"),
    "victim is the smallest rank": ("scheduler", "in reversed(self._running):", "in self._running:"),
    "smallest rank preempts itself": (
        "scheduler",
        "        if asking.rank == self._running[0].rank or not",
        "        if not",
    ),
    "victim was granted already": (
        "scheduler",
        "            if self._granted.isdisjoint(self._book.mates(seq)):\n",
        "            if True:\n",
    ),
    "admits while preempting": ("scheduler", "if plan.preempted or len(", "if len("),
    "too many run": (
        "scheduler",
        "> max(self._max_running, len(mates)):",
        "> max(self._max_running, len(mates)) + len(mates):",
    ),
    "budget not counted": ("scheduler", "            view.left -= n\n", ""),
    "abort leaks": ("scheduler", "                self._leaving.append(seq)\n", ""),
    "abort frees under a plan": (
        "scheduler",
        "        if self._plan is None:\n            self._let_go()",
        "        self._let_go()",
    ),
    "aborted outputs taken": (
        "scheduler",
        "if seq.state is not State.RUNNING:\n                continue",
        "pass",
    ),
    "failure ignored": ("scheduler", "if output.failure is not None:", "if False:"),
    "finished keeps its blocks": (
        "scheduler",
        "            self.pins.forget(seq.request.id)\n            self._pool.release(seq)\n",
        "            self.pins.forget(seq.request.id)\n",
    ),
    "resume forgets the tokens": ("group", "*(resume.tokens if resume else ())", ""),
    "resumed refused by a full queue": ("scheduler", "if not request.resume:", "if True:"),
    "preempted never queued again": (
        "scheduler",
        "        self._waiting[group.sequences[0]] = None\n",
        "",
    ),
    "reservation not kept": ("scheduler", "for one in (*joining, *self._running):", "for one in joining:"),
    "reservation of the policy ignored": (
        "scheduler",
        "self._fits(mates, n, view.reserve)",
        "self._fits(mates, n, self._reserve)",
    ),
    "recomputation counted as a hit": (
        "advance",
        "fresh = max(0, attached - seq.reached)",
        "fresh = attached",
    ),
    "recomputation not counted": (
        "advance",
        "    return again\n",
        "    return 0\n",
    ),
    "hits forgotten by a preemption": (
        "advance",
        "    seq.cached += fresh\n",
        "    seq.cached = fresh\n",
    ),
    # -- searches
    "a dropped beam keeps its blocks": ("sharing", "            pool.release(seq)\n", ""),
    "a branch without its token": ("sharing", "        child.tokens.append(token)", "        pass"),
    "a search ends with what is not among the best": ("group", "elif place < self._width:", "else:"),
    "a search ends too early": ("group", "if len(self._best) < self._width:", "if not self._best:"),
    "a search never ends early": ("group", "        if early is True:\n            return True\n", ""),
    "length penalty ignored": ("group", "score / length**self._params.length_penalty", "score"),
    "too few candidates": ("group", "(1 + max(1, len(self._params.stop_ids))) * self._width", "self._width"),
    "a search admitted beyond the slots": (
        "scheduler",
        " + len(mates) > max(self._max_running, len(mates)):",
        " >= max(self._max_running, len(mates)):",
    ),
    "choices of a search forgotten": ("book", "home.join(request)", "pass"),
    # -- policies
    "orca reserves nothing": ("batching", "v.reserve, v.patient = reserve_full, False", "v.patient = False"),
    "orca lets decodes wait": (
        "batching",
        "= reserve_full, False\n    for s in v.decoding:\n        yield s, s.pending\n",
        "= reserve_full, False\n",
    ),
    "prompts share a step over the budget": (
        "batching",
        "        if n > v.left and not first:\n            return\n",
        "",
    ),
    "a prompt above the budget never joins": ("batching", "if n > v.left and not first:", "if n > v.left:"),
    "served_ratio ignores its ratio": (
        "batching",
        "len(v.waiting) > self._ratio * running",
        "bool(v.waiting)",
    ),
    "served_ratio never counts": ("batching", "0 if v.granted else self._without + 1", "0"),
    "served_ratio never starts again": (
        "batching",
        "0 if v.granted else self._without + 1",
        "self._without + 1",
    ),
    "static never waits": ("batching", "if len(v.waiting) < size and v.now < due:", "if False:"),
    "a full batch waits too": ("batching", "if len(v.waiting) < size and v.now < due:", "if v.now < due:"),
    "a short batch waits for ever": (
        "batching",
        "if len(v.waiting) < size and v.now < due:",
        "if len(v.waiting) < size:",
    ),
    "patience used up behind a batch": (
        "batching",
        "        self._since, v.patient = None, False\n        batch =",
        "        v.patient = False\n        batch =",
    ),
    "window goes by the newest": ("batching", "min(s.request.arrival for s", "max(s.request.arrival for s"),
    "a batch without padding": ("batching", "v.pad(max(granted) - n, self._length)", "pass"),
    "a finished member leaves the batch": ("batching", "v.pad(1, self._length)", "pass"),
    "adaptive_chunk never slows": ("batching", "        if ratio < 1:\n", "        if False:\n"),
    "adaptive_chunk never recovers": ("batching", "self._tokens *= min(1.1, ratio)", "pass"),
    "adaptive_chunk lets all run": ("batching", "self._seqs = max(1.0, self._decodes * cut)", "pass"),
    "adaptive_chunk ignores its first values": (
        "batching",
        "self._tokens, self._seqs = float(tokens), float(seqs)",
        "self._tokens, self._seqs = 0.0, 0.0",
    ),
    "adaptive_chunk where steps take no time": (
        "pace",
        "self.steps, self.last = self.steps + 1, seconds",
        "pass",
    ),
    # -- admission
    "predicted keeps no room": ("admission", "return max(least, min(end, peak))", "return least"),
    "predicted keeps room for all": ("admission", "return max(least, min(end, peak))", "return peak"),
    # -- orders
    "no ageing": ("order", "if now >= request.arrival + ageing:", "if False:"),
    "ageing by the clock alone": ("order", "now >= request.arrival + ageing", "now >= ageing"),
    "the aged by priority": (
        "order",
        "return (0, request.arrival, request.id)",
        "return (0, request.priority, request.arrival, request.id)",
    ),
    "priority reversed": ("order", "(seq.request.priority,)", "(-seq.request.priority,)"),
    "priority ignored": ("order", "(seq.request.priority,)", "()"),
    "last come, first served": (
        "order",
        "return (seq.request.arrival, seq.request.id)",
        "return (-seq.request.arrival, seq.request.id)",
    ),
    "sjf with the longest first": (
        "order",
        "lambda seq, now: (work[seq],)",
        "lambda seq, now: (-work[seq],)",
    ),
    "sjf without the answer": ("order", "+ context.output_weight * answer", ""),
    "sjf with work for what is cached": (
        "order",
        "return seq.pending - context.cached(seq) +",
        "return seq.pending +",
    ),
    "prefix never looked up again": (
        "order",
        "self._known[seq] = self._find(seq)\n\n    def order",
        "pass\n\n    def order",
    ),
    "prefix with the shortest first": ("order", "(-cached[seq],)", "(cached[seq],)"),
    "deadline that is lost comes first": (
        "order",
        "if now <= latest[seq] < inf else",
        "if latest[seq] < inf else",
    ),
    "deadline with most slack first": ("order", "(0, latest[seq])", "(0, -latest[seq])"),
    "deadline without the answer": ("order", "request.deadline - answer * pace.step", "request.deadline"),
    "deadline without the prompt": ("order", "due - pace.each *", "due - 0 *"),
    "adaptive makes batches of long ones": ("order", "self._long * (self._work", "-self._long * (self._work"),
    "adaptive forgets what runs": (
        "order",
        "self._long = sum(work > self._typical for work in works) / len(works) if works else 0.0",
        "pass",
    ),
    # -- fair
    "fair to the greedy": ("fairness", "return (1, self._start[seq],", "return (1, -self._start[seq],"),
    "fair by arrival": ("fairness", "return (1, self._start[seq],", "return (1,"),
    "fair with prompts for nothing": (
        "fairness",
        "tenant.counter += max(0, seq.prompt_len - seq.computed)",
        "pass",
    ),
    "fair with answers for nothing": (
        "fairness",
        "tenant.counter += self._output_weight * (done - billed)",
        "pass",
    ),
    "fair gives all places to one tenant": (
        "fairness",
        "                    counter += seq.prompt_len\n",
        "                    pass\n",
    ),
    "fair saves up credit": ("fairness", "tenant.counter = max(tenant.counter, least)", "pass"),
    "fair without ageing": (
        "fairness",
        "if now >= max(request.arrival, self._tenants[request.tenant].at) + self._ageing:",
        "if False:",
    ),
    "fair where the greedy age": (
        "fairness",
        "max(request.arrival, self._tenants[request.tenant].at)",
        "request.arrival",
    ),
}

# of what stands before the scheduler: caught by the runs that are held to their targets
MUTANTS |= {
    "deadlines that nobody watches": (
        "targets",
        "            heappush(self._deadlines, (request.deadline, request.id))\n",
        "            pass\n",
    ),
    "deadlines seen too early": (
        "targets",
        "self._deadlines[0][0] <= now:",
        "self._deadlines[0][0] <= now + 0.02:",
    ),
    "one expired at a time": (
        "targets",
        "while self._deadlines and self._deadlines[0]",
        "if self._deadlines and self._deadlines[0]",
    ),
    "expired and still waiting": ("targets", "scheduler._waiting.pop(seq, None)", "pass"),
    "expired and still running": (
        "targets",
        "scheduler._running = [seq for seq in scheduler._running if seq.state is State.RUNNING]",
        "pass",
    ),
    "refused and still waiting": (
        "targets",
        "        self._scheduler.abort(request.id)\n        self._refused",
        "        self._refused",
    ),
    "taken once and refused then": (
        "targets",
        "if not request.resume and request.parent",
        "if request.parent",
    ),
    "come again at once": ("targets", "wait = min(first - bound, next(times))", "wait = 0.0"),
    "an idle engine refuses": ("targets", " or self._scheduler.load[:2] == (1, 0)", ""),
}


def _load(module: str, source: str, **names: Any) -> SimpleNamespace:
    namespace: dict[str, Any] = {"__name__": f"pageturner.core.{module}"}
    exec(compile(source, module, "exec"), namespace)
    namespace.update(names)
    return SimpleNamespace(
        **{name: namespace[name] for name in namespace if not name.startswith("__")}, all=namespace
    )


def mutant(name: str) -> SimpleNamespace:
    """`build`, `BlockPool` and `Targets` of the core with that bug in it."""
    where, old, new = MUTANTS[name]
    folder = Path(blocks.__file__).parent
    sources = {module: (folder / f"{module}.py").read_text() for module in MODULES}
    assert sources[where].count(old) == 1, f"mutant {name!r} no longer fits {where}.py"
    sources[where] = sources[where].replace(old, new)
    store = _load("store", sources["store"])
    pool = _load("blocks", sources["blocks"], Store=store.Store).BlockPool
    group = _load("group", sources["group"])
    names = {"BlockPool": pool, "make_group": group.make_group, "Search": group.Search}
    names["Book"] = _load("book", sources["book"], Search=group.Search).Book
    sharing, advance = _load("sharing", sources["sharing"]), _load("advance", sources["advance"])
    names |= {name: sharing.all[name] for name in ("behind_sources", "held", "source_of", "take_over")}
    names |= {name: advance.all[name] for name in ("cut", "hit", "move", "news")}
    names["audit"] = _load("audit", sources["audit"], Search=group.Search).audit
    names["Pace"] = _load("pace", sources["pace"]).Pace
    names["Predictor"] = _load("predict", sources["predict"]).Predictor
    names["RESERVES"] = _load("admission", sources["admission"]).RESERVES
    policies = _load("batching", sources["batching"])
    names |= {name: policies.all[name] for name in ("POLICIES", "PolicyOptions", "View")}
    tenants = _load("fairness", sources["fairness"]).Tenants
    orders = _load("order", sources["order"], Tenants=tenants)
    names |= {name: orders.all[name] for name in ("ORDERS", "Context")}
    names["Scheduler"] = _load("scheduler", sources["scheduler"], **names).Scheduler
    build = _load("build", sources["build"], **names).build
    assert build is not assembly.make_scheduler
    targets = _load("targets", sources["targets"]).Targets
    return SimpleNamespace(build=build, BlockPool=pool, Targets=targets)
