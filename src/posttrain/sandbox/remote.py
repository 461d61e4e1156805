"""Stand-ins, on the side of the tests, for functions, classes and objects of the solution."""

from __future__ import annotations

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Any

    from posttrain.sandbox.examiner import Examiner

ORDERINGS = ("lt", "le", "gt", "ge")
# What only objects under test are asked, and the type that the answer must have.
QUESTIONS = {"len": int, "contains": bool, "int": int, "float": float} | dict.fromkeys(
    ("getitem", "setitem", "delitem", "reversed")
)
UNARY = ("neg", "pos", "abs", "invert")
# Operators by their names in the module operator.
OPERATORS = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and_",
    "or_",
    "xor",
)


class NotDefinedError(BaseException):
    """The solution lacks what the tests call, or has ended: no ``except Exception`` swallows it."""


class Remote:
    """Stands for something of the solution's.

    It can be called, iterated and shown, and has attributes: what comes back is plain data again,
    or another of these. What a test asks *about* it is another matter, because the question often
    holds the answer (``4 == x``, ``4 in x``, ``x - 4``): only an object that the tests got from a
    class or function whose objects they treat as such, an object under test, is asked at all.
    """

    def __init__(self, examiner: Examiner, number: int) -> None:
        object.__setattr__(self, "__examiner__", examiner)
        object.__setattr__(self, "__number__", number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.__examiner__.call(self, args=args, named=named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"the solution's object has no attribute {name!r} for tests")
        return self.__examiner__.of(self, do="get", name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__examiner__.of(self, do="set", name=name, value=self.__examiner__.sent(value))

    def __iter__(self) -> Any:
        return self.__examiner__.operate("iter", self)

    def __next__(self) -> Any:
        return self.__examiner__.next(self)

    def __str__(self) -> str:
        return self.__examiner__.operate("str", self, gives=str)

    def __repr__(self) -> str:
        return self.__examiner__.operate("repr", self, gives=str)

    def __hash__(self) -> int:
        return self.__examiner__.operate("hash", self, gives=int)

    def __eq__(self, other: object) -> Any:
        """Two objects of the solution's are compared there; with plain data, content here."""
        if other is self:
            return True
        if type(other) is Remote:
            return self.__examiner__.operate("eq", self, other, gives=bool)
        content = self.__examiner__.of(self, do="content")
        return NotImplemented if type(content) is Remote else content == other

    def __instancecheck__(self, instance: object) -> bool:
        if type(instance) is not Remote:
            return False
        return self.__examiner__.operate("isinstance", instance, self, gives=bool)

    def __subclasscheck__(self, kind: object) -> bool:
        if type(kind) is not Remote:
            return False
        return self.__examiner__.operate("issubclass", kind, self, gives=bool)

    def __bool__(self) -> bool:
        if not self.__examiner__.is_under_test(self):
            raise TypeError("the solution's object is neither true nor false; return True or False")
        return self.__examiner__.question("bool", self, gives=bool)

    def __enter__(self) -> Any:
        return self.__examiner__.operate("__enter__", self)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.__examiner__.operate("__exit__", self, None, None, None)


def _define_question(name: str, gives: type | None) -> None:
    def method(self: Remote, *given: Any) -> Any:
        return self.__examiner__.question(name, self, *given, gives=gives)

    setattr(Remote, f"__{name}__", method)


def _define(special: str, name: str, *, turned: bool = False) -> None:
    def method(self: Remote, *others: Any) -> Any:
        values = (*others, self) if turned else (self, *others)
        if name in ORDERINGS and type(others[0]) is not Remote:
            return NotImplemented
        if name in ORDERINGS:
            return self.__examiner__.operate(name, *values, gives=bool)
        return self.__examiner__.combine(name, *values)

    setattr(Remote, f"__{special}__", method)


for _name, _gives in QUESTIONS.items():
    _define_question(_name, _gives)
for _name in (*ORDERINGS, *UNARY):
    _define(_name, _name)
for _name in OPERATORS:
    _define(_name.strip("_"), _name)
    _define(f"r{_name.strip('_')}", _name, turned=True)
    _define(f"i{_name.strip('_')}", f"i{_name.strip('_')}")


class Absent:
    """Stands for a name that the tests want of the solution and that it does not define."""

    def __init__(self, examiner: Examiner, name: str) -> None:
        self.examiner, self.name = examiner, name

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.examiner.missing = f"NameError: name {self.name!r} is not defined"
        raise NotDefinedError(self.examiner.missing)

    def __getattr__(self, name: str) -> Any:
        return self()
