"""The faults that can be planted in the project, each with ways to answer it. The project's text is not repeated here.

The counts of tests are what the project's own suite says; a run checks them, and a wrong one is a surprise.
"""

from __future__ import annotations

from dsec.rollout.faults import Answer, Edit, Fault

_CACHE = "src/cachetools/__init__.py"
_KEYS = "src/cachetools/keys.py"


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="eviction-order",
        what="a read doesn't make an LRU entry recent, and a FIFO cache evicts its newest entry",
        parts=(
            Edit(_CACHE, "LRUCache.__getitem__", "self.__update(key)", "pass"),
            Edit(_CACHE, "FIFOCache.popitem", "iter(", "reversed("),
        ),
        broken=2,
        answers=(
            Answer("right fix, upstream's", 2, reverts=(0, 1)),
            Answer(
                "right fix, other words",
                2,
                reverts=(1,),
                edits=(Edit(_CACHE, "LRUCache.__getitem__", "pass", "self.__order.move_to_end(key)"),),
            ),
            Answer("half a fix: LRU only", 1, reverts=(0,)),
            Answer("half a fix: FIFO only", 1, reverts=(1,)),
            Answer(
                "wrong fix: moves to front",
                1,
                breaks=True,
                reverts=(1,),
                edits=(Edit(_CACHE, "LRUCache.__getitem__", "pass", "self.__order.move_to_end(key, last=False)"),),
            ),
            Answer(
                "wrong fix: evicts the newest",
                0,
                breaks=True,
                edits=(Edit(_CACHE, "LRUCache.popitem", "iter(", "reversed("),),
            ),
        ),
    ),
    Fault(
        name="expiry-boundary",
        what="an entry is still found at the instant it expires, and isn't collected then",
        parts=(
            Edit(_CACHE, "TTLCache.__contains__", " < ", " <= "),
            Edit(_CACHE, "TTLCache.expire", "not (time < curr.expires)", "time > curr.expires"),
        ),
        broken=3,
        answers=(
            Answer("right fix, upstream's", 3, reverts=(0, 1)),
            Answer(
                "right fix, other words",
                3,
                reverts=(0,),
                edits=(Edit(_CACHE, "TTLCache.expire", "time > curr.expires", "time >= curr.expires"),),
            ),
            Answer("half a fix: lookup only", 1, reverts=(0,)),
            Answer("half a fix: collecting only", 1, reverts=(1,)),
            Answer(
                "wrong fix: a grace second",
                0,
                breaks=True,
                edits=(Edit(_CACHE, "TTLCache.expire", "time > curr.expires", "time > curr.expires + 1"),),
            ),
            Answer(
                "wrong fix: expires all",
                1,
                breaks=True,
                reverts=(0,),
                edits=(Edit(_CACHE, "TTLCache.expire", " and time > curr.expires", ""),),
            ),
        ),
    ),
    Fault(
        name="size-accounting",
        what="overwriting an entry counts its size twice, and deleting one gives back 1 whatever its size",
        parts=(
            Edit(_CACHE, "Cache.__setitem__", "size - self.__size[key]", "size"),
            Edit(_CACHE, "Cache.__delitem__", "-= size", "-= 1"),
        ),
        broken=27,
        answers=(
            Answer("right fix, upstream's", 27, reverts=(0, 1)),
            Answer(
                "right fix, other words",
                27,
                reverts=(1,),
                edits=(
                    Edit(
                        _CACHE, "Cache.__setitem__", "+= diffsize", "= sum(self.__size[each] for each in self.__data)"
                    ),
                ),
            ),
            Answer("half a fix: overwriting only", 0, reverts=(0,)),
            Answer("half a fix: deleting only", 11, reverts=(1,)),
            Answer(
                "wrong fix: counts entries",
                0,
                edits=(
                    Edit(
                        _CACHE,
                        "Cache.currsize",
                        old="self.__currsize",
                        new="len(self.__data)",
                    ),
                ),
            ),
            Answer(
                "wrong fix: overwrites free",
                11,
                reverts=(1,),
                edits=(
                    Edit(_CACHE, "Cache.__setitem__", "diffsize = size\n        else", "diffsize = 0\n        else"),
                ),
            ),
        ),
    ),
    Fault(
        name="call-keys",
        what="a method's key depends on its object, and a typed key ignores the type of the first argument",
        parts=(
            Edit(_KEYS, "methodkey", "hashkey(", "hashkey(self, "),
            Edit(_KEYS, "typedkey", "for v in args", "for v in args[1:]"),
        ),
        broken=12,
        answers=(
            Answer("right fix, upstream's", 12, reverts=(0, 1)),
            Answer(
                "right fix, other words",
                12,
                reverts=(0,),
                edits=(Edit(_KEYS, "typedkey", "tuple(type(v) for v in args[1:])", "tuple(map(type, args))"),),
            ),
            Answer("half a fix: methods only", 1, reverts=(0,)),
            Answer("half a fix: types only", 11, reverts=(1,)),
            Answer(
                "wrong fix: one key for all",
                12,
                breaks=True,
                reverts=(1,),
                edits=(Edit(_KEYS, "methodkey", "hashkey(self, *args, **kwargs)", "hashkey()"),),
            ),
            Answer(
                "wrong fix: types, no values",
                1,
                breaks=True,
                reverts=(0,),
                edits=(Edit(_KEYS, "typedkey", "key = hashkey(*args, **kwargs)", "key = hashkey()"),),
            ),
        ),
    ),
    Fault(
        name="use-counting",
        what="a read makes an LFU entry less used, and a deleted entry keeps its count",
        parts=(
            Edit(_CACHE, "LFUCache.__getitem__", "-= 1", "+= 1"),
            Edit(_CACHE, "LFUCache.__delitem__", "del self.__counter[key]", "pass"),
        ),
        broken=8,
        answers=(
            Answer("right fix, upstream's", 8, reverts=(0, 1)),
            Answer(
                "right fix, other words",
                8,
                edits=(
                    Edit(_CACHE, "LFUCache.__getitem__", "self.__counter[key] += 1", "self.__counter.subtract((key,))"),
                    Edit(_CACHE, "LFUCache.__delitem__", "pass", "self.__counter.pop(key)"),
                ),
            ),
            Answer("half a fix: reads only", 4, reverts=(0,)),
            Answer("half a fix: deleting only", 7, reverts=(1,)),
            Answer(
                "wrong fix: zeroes the count",
                0,
                reverts=(0,),
                edits=(Edit(_CACHE, "LFUCache.__delitem__", "pass", "self.__counter[key] = 0"),),
            ),
            Answer(
                "wrong fix: evicts most used",
                7,
                reverts=(0, 1),
                edits=(Edit(_CACHE, "LFUCache.popitem", "most_common(1)", "most_common()[-1:]"),),
            ),
        ),
    ),
    Fault(
        name="mapping-defaults",
        what="setdefault() overwrites what is there, and pop() of a missing key raises even with a default",
        parts=(
            Edit(_CACHE, "Cache.setdefault", "value = self[key]", "self[key] = value = default"),
            Edit(_CACHE, "Cache.pop", "elif default is self.__marker", "elif default is not self"),
        ),
        broken=18,
        answers=(
            Answer("right fix, upstream's", 18, reverts=(0, 1)),
            Answer(
                "right fix, other words",
                18,
                reverts=(1,),
                edits=(
                    Edit(
                        _CACHE,
                        "Cache.setdefault",
                        new="""
                        def setdefault(self, key, default=None):
                            if key not in self:
                                self[key] = default
                                return default
                            return self[key]
                        """,
                    ),
                ),
            ),
            Answer("half a fix: setdefault only", 2, reverts=(0,)),
            Answer("half a fix: pop only", 8, reverts=(1,)),
            Answer(
                "wrong fix: pop never raises",
                2,
                breaks=True,
                reverts=(0,),
                edits=(Edit(_CACHE, "Cache.pop", "elif default is not self", "elif False"),),
            ),
            Answer(
                "wrong fix: stores nothing",
                10,
                breaks=True,
                reverts=(1,),
                edits=(
                    Edit(
                        _CACHE,
                        "Cache.setdefault",
                        new="""
                        def setdefault(self, key, default=None):
                            return self.get(key, default)
                        """,
                    ),
                ),
            ),
        ),
    ),
)
