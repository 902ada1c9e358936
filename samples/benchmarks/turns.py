"""One process of a comparison, in which several ways to train the same model take turns.

    python -m samples.benchmarks.turns [--pinned] plain|compiled|by-hand ... -- arguments of samples.train

Everything is bound at the start. Then each line "compiled 4" on standard input asks for four steps of that way, and
rank 0 answers with a line of JSON: [loss, seconds] of each. All ranks must be asked for the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator

from samples.benchmarks.pinned import keep_cores, schedule_in_batches

WAYS = ("plain", "compiled", "by-hand")


def take_turns(ways: list[str], words: list[str]) -> None:
    """Train as standard input says, with samples.train's arguments `words`."""
    from samples import train  # only now: torch starts threads, which inherit cores and scheduling
    from samples.benchmarks.hand_written import train_by_hand

    trainers: dict[str, Callable[[argparse.Namespace], Iterator[tuple[float, float]]]] = {
        "plain": train.train,
        "compiled": train.train,
        "by-hand": train_by_hand,
    }
    running = {}
    for way in ways:
        args = train.parse_arguments([*words, *(["--plain"] if way == "plain" else [])])
        running[way] = trainers[way](args)
    for line in sys.stdin:
        way, steps = line.split()
        taken = list(itertools.islice(running[way], int(steps)))
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps(taken), flush=True)


def main() -> None:
    own, _, words = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="+", choices=WAYS)
    parser.add_argument("--pinned", action="store_true", help="as samples.benchmarks.pinned")
    args = parser.parse_args(own.split())
    if args.pinned:
        keep_cores(int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        schedule_in_batches()
    take_turns(args.ways, words.split())


if __name__ == "__main__":
    main()
