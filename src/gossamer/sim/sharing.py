"""Max-min fair shares of links, by progressive filling.

Source: D. Bertsekas and R. Gallager, "Data Networks", 2nd ed., 1992, section 6.5.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_VECTORISE_ABOVE = 32  # flows; below, plain Python is faster than numpy


def max_min_rates(links: Sequence[tuple[int, ...]], capacity: Sequence[int]) -> list[int]:
    """Max-min fair integer rates by progressive filling.

    Args:
        links: per flow, the indices of the links that it uses (at least one).
        capacity: per link.

    All rates rise together until a link is full; its flows keep what they have, the others go on.
    Shares are rounded down, so a link can keep up to (number of its flows - 1) units unused.
    """
    if len(links) > _VECTORISE_ABOVE:
        return _max_min_rates_vectorised(links, capacity)
    return _max_min_rates_scalar(links, capacity)


def _max_min_rates_scalar(links: Sequence[tuple[int, ...]], capacity: Sequence[int]) -> list[int]:
    count: dict[int, int] = {}
    for used in links:
        for link in used:
            count[link] = count.get(link, 0) + 1
    left = {link: capacity[link] for link in count}
    rates = [0] * len(links)
    rising = list(range(len(links)))
    while rising:
        shares = {link: left[link] // count[link] for link in count}
        level = min(shares.values())
        still_rising = []
        for flow in rising:
            if all(shares[link] > level for link in links[flow]):
                still_rising.append(flow)
                continue
            rates[flow] = level
            for link in links[flow]:
                left[link] -= level
                count[link] -= 1
        rising = still_rising
        count = {link: number for link, number in count.items() if number}
    return rates


def _max_min_rates_vectorised(
    links: Sequence[tuple[int, ...]], capacity: Sequence[int]
) -> list[int]:
    num_links, width = len(capacity), max(map(len, links))
    nowhere = num_links  # pads the flows that use fewer links
    padded = [used + (nowhere,) * (width - len(used)) for used in links]
    links_FK = np.array(padded, dtype=np.int64)  # flows x links of a flow
    left = np.array([*capacity, 0], dtype=np.int64)
    rates = np.zeros(len(links), dtype=np.int64)
    rising = np.arange(len(links))
    while rising.size:
        count = np.bincount(links_FK[rising].ravel(), minlength=num_links + 1)
        count[nowhere] = 0
        shares = np.where(count > 0, left // np.maximum(count, 1), np.iinfo(np.int64).max)
        level = shares.min()
        full = (shares == level)[links_FK[rising]].any(axis=1)
        settled = rising[full]
        rates[settled] = level
        left -= level * np.bincount(links_FK[settled].ravel(), minlength=num_links + 1)
        rising = rising[~full]
    result: list[int] = rates.tolist()
    return result
