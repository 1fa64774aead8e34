"""What the double says: a plausible text a kind of prompt, and a right answer where a question has an evident one."""

import re

from sglang._double import tokens

FIB = """def fibonacci(n):
    # The sequence starts with 0 and 1; each number is the sum of the two before it.
    if n < 2:
        return n
    previous, current = 0, 1
    for step in range(2, n + 1):
        previous, current = current, previous + current
    return current


def sequence(limit):
    numbers = []
    for index in range(limit):
        numbers.append(fibonacci(index))
    return numbers


print(sequence(10))
"""
QSORT = """def quicksort(items):
    if len(items) <= 1:
        return items
    pivot = items[len(items) // 2]
    smaller = [item for item in items if item < pivot]
    equal = [item for item in items if item == pivot]
    larger = [item for item in items if item > pivot]
    return quicksort(smaller) + equal + quicksort(larger)


print(quicksort([3, 6, 8, 10, 1, 2, 1]))
"""
ARITH = """Let us go step by step. The sum of the first n numbers is n times n plus 1, divided by 2.
For n = 100 that is 100 times 101, which is 10100, divided by 2, which is 5050.
So the answer is 5050. We can check it with a smaller case: for n = 4 we have 1 + 2 + 3 + 4 = 10, and 4 times 5 over 2 is 10 too.
"""
JSON = """{"name": "example", "items": [{"id": 1, "label": "first", "price": 9.5}, {"id": 2, "label": "second", "price": 12.0}],
 "total": 21.5, "currency": "EUR", "shipped": false, "tags": ["new", "sale"]}
"""
HAIKU = """Old servers humming,
one node wakes without its weights:
the log tells us why.
"""
PROSE = """The question has several sides, and it helps to look at them one after another. First there is what can be observed
directly; then what follows from it; and at last what remains uncertain. A careful answer keeps these three apart. In practice
people often begin with the conclusion and look for support afterwards, which is the surest way to miss the simple cause.
"""
BY_KIND = {"fib": FIB, "qsort": QSORT, "arith": ARITH, "json": JSON, "haiku": HAIKU}
GARBAGE = " foss"

CAPITALS = {"france": "Paris", "germany": "Berlin", "italy": "Rome", "spain": "Madrid", "japan": "Tokyo"}
SUM = re.compile(r"(-?\d{1,9})\s*(\+|-|\*|×|x|plus|minus|times)\s*(-?\d{1,9})")
CAPITAL = re.compile(r"capital(?: city)? of (\w+)", re.IGNORECASE)
REPEAT = re.compile(r"(?:repeat|reply|answer|respond|say)[^\"'\n]{0,60}[\"']([^\"'\n]{1,80})[\"']", re.IGNORECASE)


def answer(prompt):
    """The answer to the last question of a prompt, where it is evident: a sum, a capital, a word to repeat. Else None."""
    tail = prompt[-600:]
    found = None
    for match in SUM.finditer(tail):
        left, sign, right = int(match[1]), match[2], int(match[3])
        found = (match.start(), str(_compute(left, sign, right)))
    for match in CAPITAL.finditer(tail):
        if match[1].lower() in CAPITALS:
            found = max(found or (-1, ""), (match.start(), CAPITALS[match[1].lower()]))
    for match in REPEAT.finditer(tail):
        found = max(found or (-1, ""), (match.start(), match[1]))
    return found[1] if found else None


def _compute(left, sign, right):
    if sign in ("+", "plus"):
        return left + right
    if sign in ("-", "minus"):
        return left - right
    return left * right


class Writer:
    """Writes a text token by token, and goes on from its beginning as long as it is asked to."""

    def __init__(self, kind, prompt, garbage=False):
        known = answer(prompt)
        self.tokens = tokens.split(BY_KIND.get(kind, PROSE))
        if garbage:
            self.tokens = [GARBAGE]
        self.first = [] if garbage or known is None else tokens.split(known + ".\n")
        self.natural = len(self.first) if self.first and kind == "*" else None
        self.at = 0

    def take(self, count):
        """The next `count` tokens as one text."""
        out = []
        for _ in range(count):
            if self.at < len(self.first):
                out.append(self.first[self.at])
            else:
                out.append(self.tokens[(self.at - len(self.first)) % len(self.tokens)])
            self.at += 1
        return "".join(out)
