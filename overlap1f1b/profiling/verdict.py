"""The verdict in one sentence, and advice for what to try next."""

from __future__ import annotations

from overlap1f1b.plan import About
from overlap1f1b.profiling.figures import Figures

_NAMES = {"warm_up": "warm-up", "steady": "steady phase", "cool_down": "cool-down"}
WELL, NONE = 0.9, 0.05
"""Hidden shares: from the first on, an exchange counts as hidden; up to the second, as not hidden."""
WORTH = 0.05
"""Least share of a step at which a loss gets an advice."""


def verdict(sums: Figures) -> str:
    """Return one sentence: whether the exchange is hidden, and if not, where it is exposed.

    More sentences follow: what causes that, and whether the host bounds the steps.
    """
    sentences, starved, exposed = [_of_exchange(sums)], sums.share(sums.starved), sums.overlap.exposed
    if sums.by_cause and sums.share(exposed) >= WORTH:
        causes = sorted(sums.by_cause.items(), key=lambda one: -one[1])
        said = (f"{time / exposed:.0%} {cause}" for cause, time in causes if time >= WORTH * exposed)
        sentences.append(f"By cause: {', '.join(said)}.")
    if starved >= WORTH:
        sentences.append(
            f"The host bounds the step: for {starved:.0%} of it the device had nothing to compute but what the host "
            "was still launching."
        )
    return " ".join(sentences)


def _of_exchange(sums: Figures) -> str:
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
    overlap, idle, causes = sums.overlap, sums.idle, sums.by_cause
    order = sums.share(causes.get("order", overlap.exposed)) if overlap.hidden_fraction < WELL else 0
    imbalance, link = (sums.share(causes.get(cause, 0.0)) for cause in ("imbalance", "link"))
    bubble = sums.share(idle["pipeline_bubble"] + causes.get("pipeline", 0.0))
    host = sums.share(max(idle["host_late"] + causes.get("host", 0.0), sums.starved) if causes else sums.starved)
    held = sums.share(sums.queued) if overlap.exposed else 0
    tips = (
        (order, _against_exposure(sums, about or About())),
        (
            imbalance,
            f"ranks wait for a slower one for {imbalance:.0%} of a step: give all ranks equal work (a bias, a "
            "capacity, balanced batches) and processors of their own; the rank that waits least is the slow one",
        ),
        (
            link,
            f"exchanges take longer than planned for {link:.0%} of a step: overlap1f1b doctor looks at the link; if it "
            "stays slow, measure again and plan anew",
        ),
        (
            bubble,
            f"the pipeline bubble is {bubble:.0%} of a step: more microbatches or more chunks (interleaved_1f1b, "
            "dualpipev, zb_v); overlap1f1b plan --search compares them",
        ),
        (
            host,
            f"the host issues late for {host:.0%} of a step: larger microbatches, fewer and larger blocks, and on a "
            "GPU no calls that synchronise in the model's forward",
        ),
        (
            held,
            f"exchanges wait on the device behind compute for {held:.0%} of a step: a higher priority for the "
            "exchange stream",
        ),
    )
    return [text for share, text in sorted(tips, key=lambda tip: -tip[0]) if share >= WORTH]


def _against_exposure(sums: Figures, about: About) -> str:
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
    phases = sums.by_phase
    edges = sum(phases[name].exposed for name in ("warm_up", "cool_down") if name in phases)
    if edges > overlap.exposed / 2:
        return "most is exposed where a step begins and ends: more microbatches, or extra_warmup=1 if it is 0"
    return "more open actions (overlap=4), more microbatches or two chunks; overlap1f1b plan --search compares"
