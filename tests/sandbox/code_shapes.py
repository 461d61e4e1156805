"""Tests of code in every shape they come in, each with a right and a wrong program."""

ADD = ("def add(a, b): return a + b", "def add(a, b): return a - b")
STACK = """
class Stack:
    limit = 3
    def __init__(self, items=()): self.items = list(items)
    @classmethod
    def of(cls, *items): return cls(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items: raise StackError("empty", 7)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __contains__(self, item): return item in self.items
    def __iter__(self): return iter(self.items)
    def __getitem__(self, place): return self.items[place]
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __bool__(self): return bool(self.items)
    def __repr__(self): return f"Stack({self.items})"
class StackError(LookupError):
    def __init__(self, message, code):
        super().__init__(message)
        self.code = code
"""
BAD_STACK = STACK.replace("self.items.append(item)", "self.items.insert(0, item)").replace(
    "limit = 3", "limit = 4").replace("StackError(\"empty\", 7)", "KeyError()").replace(
    "return cls(items)", "return cls()").replace("Stack({", "S({")  # fmt: skip
BOTH = (STACK, BAD_STACK)
VECTOR = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
    def __mul__(self, k): return Vector(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __neg__(self): return Vector(-self.x, -self.y)
    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)
    def __lt__(self, o): return self.x < o.x
    def __hash__(self): return hash((self.x, self.y))
"""
VECTORS = (VECTOR, VECTOR.replace("self.x + o.x", "self.x - o.x"))
ASYNC = ("async def twice(x): return 2 * x", "async def twice(x): return x")

# id: (tests, (right, wrong))
PYTEST: dict[str, tuple[str, tuple[str, str]]] = {
    "a function": ("def test_add():\n    assert add(1, 2) == 3", ADD),
    "called test": ("def test():\n    assert add(1, 2) == 3", ADD),
    "a class": ("class TestAdd:\n    def test_it(self):\n        assert add(1, 2) == 3", ADD),
    "setup_method": (
        """
        class TestAdd:
            def setup_method(self, method):
                self.one = 1
            def test_it(self):
                assert add(self.one, 2) == 3
        """, ADD),
    "setup_class and a static test": (
        """
        class TestAdd:
            @classmethod
            def setup_class(cls):
                cls.one = 1
            def test_it(self):
                assert add(self.one, 2) == 3
            @staticmethod
            def test_zero():
                assert add(0, 0) == 0
        """, ADD),
    "setup_module": (
        "def setup_module():\n    global one\n    one = 1\n"
        "def test():\n    assert add(one, 2) == 3",
        ADD),
    "unittest": (
        """
        import unittest
        class Adding(unittest.TestCase):
            def setUp(self):
                self.one = 1
            def test_it(self):
                self.assertEqual(add(self.one, 2), 3)
        if __name__ == "__main__":
            unittest.main()
        """, ADD),
    "unittest, from": (
        """
        from unittest import TestCase
        class Adding(TestCase):
            @classmethod
            def setUpClass(cls):
                cls.one = 1
            def test_it(self):
                with self.subTest(n=1):
                    self.assertAlmostEqual(add(self.one, .2), 1.2)
                with self.assertRaises(TypeError):
                    add(None, 1)
        """, ADD),
    "unittest, awaited": (
        """
        import unittest
        class Twice(unittest.IsolatedAsyncioTestCase):
            async def test_it(self):
                self.assertEqual(await twice(2), 4)
        unittest.main()
        """, ASYNC),
    "async": ("async def test_add():\n    assert add(1, 2) == 3", ADD),
    "async, marked": (
        "import pytest\n@pytest.mark.asyncio\nasync def test():\n    assert await twice(2) == 4",
        ASYNC),
    "asyncio.run": ("import asyncio\nassert asyncio.run(twice(2)) == 4", ASYNC),
    "gathered": (
        "import asyncio\nasync def test():\n    got = await asyncio.gather(twice(1), twice(2))\n"
        "    assert got == [2, 4]", ASYNC),
    "raises": (
        "import pytest\ndef test():\n    with pytest.raises(ValueError, match='no .*'):\n"
        "        half(3)",
        ("def half(n): raise ValueError(f'no half of {n}')", "def half(n): raise KeyError(n)")),
    "raises, at the top": (
        "with pytest.raises(ZeroDivisionError):\n    invert(0)",
        ("def invert(n): return 1 / n", "def invert(n): return 0")),
    "raises, looked at": (
        "import pytest\ndef test():\n    with pytest.raises(KeyError) as info:\n        find(3)\n"
        "    assert info.value.args == (3,)\n    assert str(info.value) == '3'",
        ("def find(n): return {}[n]", "def find(n): return {}[n + 1]")),
    "raises an exception of its own": (
        "import pytest\ndef test():\n    with pytest.raises(StackError) as info:\n"
        "        Stack().pop()\n    assert info.value.code == 7\n"
        "    assert issubclass(StackError, LookupError)", BOTH),
    "exits": (
        "import pytest\ndef test():\n    with pytest.raises(SystemExit) as info:\n        end()\n"
        "    assert info.value.code == 2",
        ("import sys\ndef end(): sys.exit(2)", "import sys\ndef end(): sys.exit(3)")),
    "approx": ("from pytest import approx\ndef test():\n    assert add(.1, .2) == approx(.3)", ADD),
    "approx of a list": (
        "import pytest\ndef test():\n    assert add([.1 + .2], []) == pytest.approx([.3])",
        (ADD[0], "def add(a, b): return [.31]")),
    "approx of a dict": (
        "import pytest\ndef test():\n    assert f() == pytest.approx({'a': 1.0}, abs=.01)",
        ("def f(): return {'a': 1.001}", "def f(): return {'a': 1.02}")),
    "parametrize": (
        """
        import pytest
        @pytest.mark.parametrize("a, b, total", [(1, 2, 3), pytest.param(2, 2, 4, id="twos")])
        def test_add(a, b, total):
            assert add(a, b) == total
        """, ADD),
    "parametrize, twice": (
        """
        import pytest
        @pytest.mark.parametrize("a", [1, 2])
        @pytest.mark.parametrize("b", [3, 4])
        def test_add(a, b):
            assert add(a, b) == a + b
        """, ADD),
    "parametrize a class": (
        """
        import pytest
        @pytest.mark.parametrize(("a", "total"), [(1, 2), (2, 4)])
        class TestAdd:
            def test_add(self, a, total):
                assert add(a, a) == total
        """, ADD),
    "a fixture": (
        """
        import pytest
        @pytest.fixture
        def stack():
            return Stack([1])
        @pytest.fixture(scope="module")
        def two():
            yield 2
        def test_push(stack, two):
            stack.push(two)
            assert stack.pop() == 2
        """, BOTH),
    "a fixture of a fixture, in a class": (
        """
        import pytest
        class TestAdd:
            @pytest.fixture
            def one(self):
                return 1
            @pytest.fixture
            def two(self, one):
                return one + 1
            @pytest.fixture(autouse=True)
            def around(self):
                self.three = 3
                yield
            def test_it(self, one, two):
                assert add(one, two) == self.three
        """, ADD),
    "a skipped test": (
        "import pytest\n@pytest.mark.skip(reason='later')\ndef test_no():\n    assert 0\n"
        "def test():\n    assert add(1, 2) == 3", ADD),
    "from solution import": (
        "from solution import add\ndef test():\n    assert add(1, 2) == 3", ADD),
    "import solution": (
        "import solution as s\ndef test():\n    assert s.add(1, 2) == 3", ADD),
    "a built-in name, imported": (
        "from solution import sum\nassert sum([1, 2]) == 4",
        ("def sum(xs): return 4", "def sum(xs): return 3")),
    "what is printed": (
        "def test(capsys):\n    hello('you')\n    assert capsys.readouterr().out == 'Hello you\\n'",
        ("def hello(x): print('Hello', x)", "def hello(x): return 'Hello ' + x")),
    "what is printed, redirected": (
        """
        import contextlib, io
        with contextlib.redirect_stdout(io.StringIO()) as out:
            hello("you")
        assert out.getvalue() == "Hello you\\n"
        """, ("def hello(x): print('Hello', x)", "def hello(x): return 'Hello ' + x")),
    "under __main__": ("if __name__ == '__main__':\n    assert add(1, 2) == 3", ADD),
    "a helper under __main__": (
        "def run():\n    assert add(1, 2) == 3\nif __name__ == '__main__':\n    run()", ADD),
    "a test that calls check": (
        "def check(f):\n    assert f(1, 2) == 3\ndef test():\n    check(add)", ADD),
    "a doctest": (">>> add(1, 2)\n3\n>>> print(add(2, 2))\n4", ADD),
    "a doctest that imports": (">>> from solution import add\n>>> add(1, 2)\n3", ADD),
    "a doctest in a docstring": ('"""Adds.\n\n>>> x = add(1, 2)\n>>> x\n3\n"""', ADD),
    "a doctest that raises": (
        ">>> invert(0)\nTraceback (most recent call last):\nZeroDivisionError: division by zero",
        ("def invert(n): return 1 / n", "def invert(n): return 0")),
}  # fmt: skip
OBJECTS: dict[str, tuple[str, tuple[str, str]]] = {
    "a cache": (
        "c = LRUCache(1)\nc.put(1, 1)\nc.put(2, 2)\nassert c.get(1) == -1\nassert c.get(2) == 2",
        ("class LRUCache:\n    def __init__(self, n): self.d = {}\n"
         "    def put(self, k, v): self.d = {k: v}\n    def get(self, k): return self.d.get(k, -1)",
         "class LRUCache:\n    def __init__(self, n): self.d = {}\n"
         "    def put(self, k, v): self.d[k] = v\n    def get(self, k): return self.d.get(k, -1)")),
    "length, truth, items": (
        "s = Stack()\nassert not s\ns.push(1).push(2)\nassert len(s) == 2 and s and 2 in s\n"
        "assert 3 not in s\nassert list(s) == [1, 2]\nassert s[1] == 2", BOTH),
    "equal objects": ("assert Stack([1]).push(2) == Stack([1, 2])", BOTH),
    "unequal objects": ("assert Stack.of(1) != Stack([])", BOTH),
    "an attribute of a class": ("assert Stack.limit == 3", BOTH),
    "a class method": ("assert Stack.of(1, 2).items == [1, 2]", BOTH),
    "shown": ("assert str(Stack([1])) == 'Stack([1])'", BOTH),
    "isinstance": (
        "x = make(1)\nassert isinstance(x, Stack) and not isinstance(x, int)\n"
        "assert x.items == [1]",
        (STACK + "def make(n): return Stack([n])", STACK + "def make(n): return [n]")),
    "an attribute that is set": (
        "s = Stack([1])\ns.items = [5]\nassert s.pop() == 5\nassert Stack([1]).push(2).pop() == 2",
        BOTH),
    "a subclass of list": (
        "s = Pile([1])\ns.put(2)\nassert s.top() == 2\nassert s == [1, 2]\nassert len(s) == 2",
        ("class Pile(list):\n    def put(self, x): self.append(x)\n"
         "    def top(self): return self[-1]",
         "class Pile(list):\n    def put(self, x): self.insert(0, x)\n"
         "    def top(self): return self[0]")),
    "a data class": (
        "assert shift(Point(1, 2)) == Point(2, 2)\nassert shift(Point(1, 2)).x == 2",
        ("from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int\n"
         "def shift(p): return Point(p.x + 1, p.y)",
         "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int\n"
         "def shift(p): return Point(p.x, p.y + 1)")),
    "a named tuple": (
        "p = f()\nassert p.x == 1 and p == (1, 2)",
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
         "from collections import namedtuple\nP = namedtuple('P', 'y x')\n"
         "def f(): return P(1, 2)")),
    "an enumeration": (
        "assert next_of(Color.RED) == Color.GREEN\nassert Color.RED.value == 1\n"
        "assert Color(2) is Color.GREEN\nassert len(Color) == 2",
        ("import enum\nclass Color(enum.Enum):\n    RED = 1\n    GREEN = 2\n"
         "def next_of(c): return Color.GREEN",
         "import enum\nclass Color(enum.Enum):\n    RED = 1\n    GREEN = 2\n"
         "def next_of(c): return Color.RED")),
    "an enumeration of texts": (
        "assert Level.LOW == 'low'\nassert Level.LOW.value == 'low'",
        ("import enum\nclass Level(str, enum.Enum):\n    LOW = 'low'",
         "import enum\nclass Level(str, enum.Enum):\n    LOW = 'high'")),
    "arithmetic": (
        "v = Vector(1, 2) + Vector(1, 1)\nassert v == Vector(2, 3)\nassert (v.x, v.y) == (2, 3)\n"
        "assert v * 2 == 2 * v == Vector(4, 6) and -v == Vector(-2, -3)", VECTORS),
    "order and sets of objects": (
        "assert min(Vector(3, 0), Vector(1, 0) + Vector(1, 0)).x == 2\n"
        "assert len({Vector(1, 2), Vector(1, 2)}) == 1", VECTORS),
    "a context": (
        "with Log() as log:\n    log.write('a')\nassert log.lines == ['a', 'end']",
        ("class Log:\n    def __enter__(self):\n        self.lines = []\n        return self\n"
         "    def write(self, s): self.lines.append(s)\n"
         "    def __exit__(self, *a): self.write('end')",
         "class Log:\n    def __enter__(self):\n        self.lines = []\n        return self\n"
         "    def write(self, s): self.lines.append(s)\n    def __exit__(self, *a): pass")),
    "a context that a function made": (
        "with tag('a') as t:\n    assert t == '<a>'",
        ("from contextlib import contextmanager\n@contextmanager\ndef tag(n): yield f'<{n}>'",
         "from contextlib import contextmanager\n@contextmanager\ndef tag(n): yield n")),
    "size, sign and conversions": (
        "assert abs(N(-2)) == N(2) and +N(1) == N(1) and ~N(1) == N(-2)\n"
        "assert int(N(3)) == 3 and float(N(3)) == 3.0\nassert abs(V(3, 4)) == 5",
        tuple("class N:\n    def __init__(s, v): s.v = v\n    def __abs__(s): return N(abs(s.v))\n"
              "    def __pos__(s): return s\n    def __invert__(s): return N(~s.v)\n"
              "    def __int__(s): return s.v\n    def __float__(s): return float(s.v)\n"
              "    def __eq__(s, o): return s.v == o.v\nclass V:\n"
              "    def __init__(s, x, y): s.x, s.y = x, y\n    def __abs__(s): return "
              + how for how in ("(s.x ** 2 + s.y ** 2) ** 0.5", "s.x + s.y"))),
    "a slice": (
        "assert Bag(1, 2, 3)[:2] == [1, 2]\nassert Bag(1, 2, 3)[::-1] == [3, 2, 1]",
        tuple("class Bag:\n    def __init__(s, *x): s.x = list(x)\n"
              f"    def __getitem__(s, i): return s.x{how}" for how in ("[i]", ""))),
    "nodes that a function made": (
        "head = build([1, 2])\nassert head.value == 1\nassert head.next.value == 2\n"
        "assert head.next.next is None",
        ("class N:\n    def __init__(s, v, n): s.value, s.next = v, n\ndef build(xs):\n"
         "    return N(xs[0], build(xs[1:])) if xs else None",
         "class N:\n    def __init__(s, v, n): s.value, s.next = v, n\ndef build(xs):\n"
         "    return N(xs[0], None) if xs else None")),
    "a closure": (
        "count = counter()\ncount()\nassert count() == 2",
        ("def counter():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n"
         "        return n\n    return up", "def counter(): return lambda: 1")),
    "an iterator with methods": (
        "it = Peeking([1, 2])\nassert it.peek() == 1\nassert next(it) == 1\nassert list(it) == [2]",
        ("class Peeking:\n    def __init__(s, xs): s.xs = list(xs)\n"
         "    def peek(s): return s.xs[0]\n    def __iter__(s): return s\n"
         "    def __next__(s):\n        if not s.xs: raise StopIteration\n"
         "        return s.xs.pop(0)",
         "class Peeking:\n    def __init__(s, xs): s.xs = list(xs)\n"
         "    def peek(s): return s.xs.pop(0)\n    def __iter__(s): return s\n"
         "    def __next__(s):\n        if not s.xs: raise StopIteration\n"
         "        return s.xs.pop(0)")),
    "an endless generator": (
        "from itertools import islice\nassert list(islice(odd(), 3)) == [1, 3, 5]",
        ("def odd():\n    n = 1\n    while True:\n        yield n\n        n += 2",
         "def odd():\n    while True: yield 1")),
    "a generator that is sent to": (
        "g = echo()\nnext(g)\nassert g.send(3) == 6",
        ("def echo():\n    x = yield\n    while True: x = yield 2 * x",
         "def echo():\n    x = yield\n    while True: x = yield x")),
    "attributes by __getattr__": (
        "assert Bag(a=1).a == 1",
        ("class Bag:\n    def __init__(s, **k): s.k = k\n    def __getattr__(s, n): return s.k[n]",
         "class Bag:\n    def __init__(s, **k): s.k = k\n    def __getattr__(s, n): return n")),
}  # fmt: skip
VALUES: dict[str, tuple[str, tuple[str, str]]] = {
    "a fraction and a number": (
        "assert f(2) == 0.5\nassert f(1) == 1",
        ("from fractions import Fraction\ndef f(n): return Fraction(1, n)", "def f(n): return n")),
    "a decimal and a number": (
        "from decimal import Decimal\nassert f(2) == 3 == Decimal('3.0')\n"
        "assert f(Decimal(1)) == 2",
        ("from decimal import Decimal\ndef f(n): return Decimal(n) + 1", "def f(n): return '3'")),
    "keys and a set": (
        "assert f({'a': 1}) == {'a'}\nassert f({}) == set()",
        ("def f(d): return d.keys()", "def f(d): return list(d)")),
    "items and values": (
        "assert sorted(f({'a': 1}).values()) == [1]\nassert g({'a': 1}) == {('a', 1)}",
        ("def f(d): return d\ndef g(d): return d.items()",
         "def f(d): return d\ndef g(d): return d.values()")),
    "dates": (
        "from datetime import date, timedelta\nassert f(date(2024, 2, 28)) == date(2024, 2, 29)\n"
        "assert g() == timedelta(days=1)",
        ("import datetime\ndef g(): return datetime.timedelta(1)\ndef f(d): return d + g()",
         "import datetime\ndef g(): return datetime.timedelta(2)\ndef f(d): return d + g()")),
    "a deque": (
        "from collections import deque\nassert f(deque([1, 2])) == deque([2, 1])",
        ("def f(d):\n    d.rotate()\n    return d", "def f(d): return d")),
    "a counter": (
        "from collections import Counter\nassert f('aab') == Counter('aab') == {'a': 2, 'b': 1}\n"
        "assert f('a')['z'] == 0",
        ("from collections import Counter\ndef f(s): return Counter(s)",
         "def f(s): return set(s)")),
    "a tuple is no list": (
        "assert f() == (1, 2)", ("def f(): return 1, 2", "def f(): return [1, 2]")),
    "an iterator is no list": (
        "assert f() == [1]", ("def f(): return [1]", "def f(): return iter([1])")),
    "a map, listed": (
        "assert list(f([1, 2])) == [2, 4]",
        ("def f(xs): return map(lambda x: 2 * x, xs)", "def f(xs): return map(str, xs)")),
    "a default dict": (
        "assert f('ab') == {'a': 1, 'b': 1}",
        ("from collections import defaultdict\ndef f(s):\n    d = defaultdict(int)\n"
         "    for c in s: d[c] += 1\n    return d", "def f(s): return {}")),
    "a built-in function as an argument": (
        "assert by(['bb', 'a'], len) == ['a', 'bb']\nassert by('21', int) == ['1', '2']",
        ("def by(xs, key): return sorted(xs, key=key)", "def by(xs, key): return list(xs)")),
    "a constant": ("assert LIMIT == 3", ("LIMIT = 3", "LIMIT = 4")),
    "recursion, defaults, inner functions": (
        "assert depth(30) == 30\nassert depth() == 0",
        ("def depth(n=0):\n    def inner(k): return 0 if not k else 1 + inner(k - 1)\n"
         "    return inner(n)", "def depth(n=0): return n or 1")),
}  # fmt: skip
SHAPES = {**PYTEST, **OBJECTS, **VALUES}
