"""One process of a comparison, in which several ways to train the same model take turns.

    python -m samples.benchmarks.turns plain|compiled|by-hand ... -- arguments of samples.train

Each line "compiled 4" on standard input asks for four steps of that way, which is bound when it is first asked for, and
rank 0 answers with a line of JSON: [loss, seconds] of each. All ranks must be asked for the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from samples import train
from samples.benchmarks.hand_written import train_by_hand

WAYS: Mapping[str, Callable[[argparse.Namespace], Iterator[tuple[float, float]]]] = {
    "plain": train.train,
    "compiled": train.train,
    "by-hand": train_by_hand,
}


def take_turns(ways: Sequence[str], words: Sequence[str]) -> None:
    """Train as standard input says, with samples.train's arguments `words`."""
    running = {}
    for way in ways:
        running[way] = WAYS[way](train.parse_arguments([*words, *(["--plain"] if way == "plain" else [])]))
    for line in sys.stdin:
        way, steps = line.split()
        taken = list(itertools.islice(running[way], int(steps)))
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    end = sys.argv.index("--")
    take_turns(sys.argv[1:end], sys.argv[end + 1 :])
