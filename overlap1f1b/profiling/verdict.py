"""The verdict in one sentence, and advice for what to try next."""

from __future__ import annotations

from overlap1f1b.plan import About
from overlap1f1b.profiling.figures import Figures

_NAMES = {"warm_up": "warm-up", "steady": "steady phase", "cool_down": "cool-down"}
WELL, NONE = 0.9, 0.05
"""Hidden shares: from the first on, an exchange counts as hidden; up to the second, as not hidden."""
WORTH = 0.05  # least share of a step at which a loss gets an advice

_TIPS = {
    "imbalance": "ranks wait for a slower one for {:.0%} of a step: give all ranks equal work (a bias, a capacity, "
    "balanced batches) and processors of their own; the rank that waits least is the slow one",
    "link": "exchanges take longer than planned for {:.0%} of a step: overlap1f1b doctor looks at the link; if it "
    "stays slow, measure again and plan anew",
    "pipeline": "the pipeline bubble is {:.0%} of a step: more microbatches or more chunks (interleaved_1f1b, "
    "dualpipev, zb_v); overlap1f1b plan --search compares them",
    "host": "the host issues late for {:.0%} of a step: larger microbatches, fewer and larger blocks, and on a GPU no "
    "calls that synchronise in the model's forward",
}
"""Against every cause but the order, with the share of a step that it takes."""


def verdict(sums: Figures) -> str:
    """Return one sentence: whether the exchange is hidden, and if not, where it is exposed.

    Others follow: what causes that, and whether the host bounds the steps.
    """
    sentences, exposed = [_of_exchange(sums)], sums.overlap.exposed
    if sums.by_cause and sums.share(exposed) >= WORTH:
        causes = sorted(sums.by_cause.items(), key=lambda one: -one[1])
        said = (f"{time / exposed:.0%} {cause}" for cause, time in causes if time >= WORTH * exposed)
        sentences.append(f"By cause: {', '.join(said)}.")
    if sums.device and (late := sums.share(sums.idle.get("host", 0.0))) >= WORTH:
        sentences.append(f"The host bounds the step: for {late:.0%} of it the device waited for a launch.")
    return " ".join(sentences)


def _of_exchange(sums: Figures) -> str:
    """Return the sentence on how much of the exchange was hidden."""
    overlap = sums.overlap
    if not sums.measured:
        return "Not measured: the files do not show all that was exchanged, so how much was hidden is unknown."
    if not overlap.exchange:
        return "Nothing was exchanged in these steps, so there was nothing to hide."
    hidden, exposed = overlap.hidden_fraction, sums.share(overlap.exposed)
    share = f"{hidden:.0%} of the exchange was hidden"
    if hidden >= WELL:
        return f"Yes: {share}; exposed exchange is {exposed:.1%} of a step."
    where = _where(sums)
    if hidden <= NONE:
        return f"No: {share}; exposed exchange is {exposed:.0%} of a step{where}."
    return f"In part: {share}; exposed exchange is {exposed:.0%} of a step{where}."


def _where(sums: Figures) -> str:
    """Return the phase and the sub-op with most exposed exchange."""
    parts = []
    if any(part.exposed for part in sums.by_phase.values()):
        phase, part = max(sums.by_phase.items(), key=lambda item: item[1].exposed)
        parts.append(f"{part.exposed / sums.overlap.exposed:.0%} of it in the {_NAMES[phase]}")
    if sums.by_sub_op:
        sub_op = max(sums.by_sub_op, key=lambda name: sums.by_sub_op[name].exposed)
        parts.append(f"most in {sub_op}")
    return f", {', '.join(parts)}" if parts else ""


def advice(sums: Figures, about: About | None = None) -> list[str]:
    """Return advice, the largest loss first; empty if no loss is large enough.

    ``about`` says what was asked for, and what the engine chose and why.
    """
    losses = dict(sums.by_cause)
    losses |= {name: sums.idle[name] for name in ("pipeline", "host") if sums.idle}  # beside no exchange, too
    losses["order"] = losses.get("order", sums.overlap.exposed) if sums.overlap.hidden_fraction < WELL else 0.0
    shares = {name: sums.share(time) for name, time in losses.items()}
    most = sorted((name for name, share in shares.items() if share >= WORTH), key=lambda name: -shares[name])
    order = _against_order(sums, about or About())
    return [_TIPS[name].format(shares[name]) if name in _TIPS else order for name in most]


def _against_order(sums: Figures, about: About) -> str:
    """Return advice that would hide more of the exchange."""
    overlap, opened = sums.overlap, sums.open_actions
    if opened == 1:
        return (
            "one action was open at a time: overlap=3, or overlap='pairs' with combined_1f1b"
            if about.overlap in ("", "serial", "1")
            else f"one action was open at a time: overlap={about.overlap} was asked for, and the engine chose "
            f"{about.choice}; overlap gains where bytes cost more (a slower link, larger rows), or where ranks do not "
            "share processors"
        )
    if sums.device and overlap.hidden_fraction <= NONE:
        return (
            "exchange and compute never ran at once: see what overlap1f1b doctor says of connections and streams, and "
            "that the exchange has a stream of its own"
        )
    most = sums.compute / overlap.exchange if overlap.exchange > sums.compute else 1.0
    if 1 - most > most - overlap.hidden_fraction:  # more is lost to the lack of compute than to the order
        return (
            f"the exchange takes {overlap.exchange / max(sums.compute, 1):.2f} times as long as compute, which can "
            f"hide {most:.0%} of it at most: more compute for each exchanged row, or fewer expert-parallel ranks"
        )
    if opened == 2:
        opens = ["overlap=3"] * (about.overlap in ("", "2", "pairs"))
        opens += ["one more warm-up forward (extra_warmup=1)"] * (about.schedule in ("", "combined_1f1b"))
        return (
            f"two actions were open at a time; a third is opened by {' and '.join(opens)}"
            if opens
            else "two actions were open at a time, though more were allowed: more microbatches or two chunks"
        )
    return "more open actions (overlap=4), more microbatches or two chunks; overlap1f1b plan --search compares"
