"""Shopping carts: consumers work in parallel, and no item is removed before it is added.

    python examples/shopping_carts.py

Customers add items to their carts and remove some again. Three consumers apply these changes in
parallel. With a plain queue, one consumer might get "remove book" while another is still busy with
"add book". Here one consumer at a time gets a cart's changes, in order, while the others work
on other carts. The program starts a private server and stops it at the end.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from functools import partial

import meteor_py as meteor

CARTS, CHANGES, CONSUMERS = 12, 600, 3
ITEMS = ("book", "pen", "tea", "lamp")


def make_changes() -> list[tuple[str, dict[str, str]]]:
    """Return random changes to carts. An item is removed only after it has been added."""
    inside: defaultdict[str, list[str]] = defaultdict(list)
    changes: list[tuple[str, dict[str, str]]] = []
    for _ in range(CHANGES):
        cart = f"cart-{random.randrange(CARTS)}"
        if inside[cart] and random.random() < 0.4:
            changes.append((cart, {"remove": inside[cart].pop()}))
        else:
            item = random.choice(ITEMS)
            inside[cart].append(item)
            changes.append((cart, {"add": item}))
    return changes


def apply(cart: Counter[str], change: dict[str, str]) -> None:
    """Apply a change. Removing an item that is not in the cart is an error."""
    for what, item in change.items():
        if what == "remove" and not cart[item]:
            raise RuntimeError(f"{item} was removed before it was added")
        cart[item] += 1 if what == "add" else -1


def main() -> None:
    changes = make_changes()
    carts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seen_by: defaultdict[str, set[int]] = defaultdict(set)

    def handle(consumer: int, record: meteor.SharedRecord) -> None:
        time.sleep(random.random() / 500)  # some changes take longer than others
        cart = record.ordering_key.decode()
        apply(carts[cart], record.value)
        seen_by[cart].add(consumer)

    with meteor.connect("embedded://") as m:
        stream = m.stream("carts", ordering_key="key", codec="json")
        with stream.publisher() as pub:
            for cart, change in changes:
                pub.publish(change, key=cart.encode())
        # Consumers usually run in other processes, on other machines. Their code is the same.
        consumers = [
            stream.shared_subscriber("billing", prefetch=8, max_per_key=4) for _ in range(CONSUMERS)
        ]
        threads = [
            threading.Thread(target=sub.run, args=[partial(handle, number)])
            for number, sub in enumerate(consumers)
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        group = stream.shared_group("billing")
        while group.confirmed < CHANGES:
            time.sleep(0.01)
        took_s = time.perf_counter() - start
        for sub in consumers:
            sub.stop()
        for thread in threads:
            thread.join()
        failures = group.describe().returned

    expected: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for cart, change in changes:
        apply(expected[cart], change)
    assert carts == expected, "the result differs from that of a single consumer"
    moved = sum(len(names) > 1 for names in seen_by.values())
    print(f"{CHANGES} changes to {len(carts)} carts by {CONSUMERS} consumers in {took_s:.2f} s")
    print(f"{moved} carts moved between consumers; {failures} changes failed")
    for cart in sorted(carts)[:3]:
        items = [f"{number} {item}" for item, number in sorted(carts[cart].items()) if number]
        print(f"{cart}: {', '.join(items) or 'empty'}")


if __name__ == "__main__":
    main()
