"""Draws one layer and four microbatches under three programs, exchange as long as compute: the README's picture."""

import overlap1f1b as o1

WIDTH = 108 / 168  # characters for each unit of time
COSTS = o1.NodeCosts.uniform(attention=3, experts=4, dispatch=5.25)

for name, overlap, options in (
    ("sequential", "serial", {}),
    ("combined_1f1b", "pairs", {"extra_warmup": 0}),
    ("combined_1f1b", 3, {"extra_warmup": 1}),
):
    program = o1.build_schedule(name, microbatches=4, **options)
    timeline = o1.simulate(program, COSTS, overlap=overlap)
    hidden = f"{timeline.hidden_fraction:.0%} of the exchange hidden"
    print(f"{program.name}, overlap {overlap}: {timeline.makespan:g} units, {hidden}")
    print(timeline.draw(round(WIDTH * timeline.makespan)))
