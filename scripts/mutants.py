"""mutmut, that also mutates functions under ``@piece(...)``.

It leaves decorated functions alone, since it cannot know what a decorator does. Ours hands back the
function that it is given. Called by `make mutants`; takes mutmut's own arguments.
"""

import sys

import libcst
from libcst import matchers
from mutmut.__main__ import cli
from mutmut.mutation.file_mutation import MutationVisitor

PIECE = matchers.Decorator(matchers.Call(func=matchers.Name("piece")))
skip = MutationVisitor._skip_node_and_children


def skip_all_but_pieces(self: MutationVisitor, node: libcst.CSTNode) -> bool:
    """Whether a node is left as it is."""
    if isinstance(node, libcst.FunctionDef) and len(node.decorators) == 1:
        return not matchers.matches(node.decorators[0], PIECE) and skip(self, node)
    return skip(self, node)


MutationVisitor._skip_node_and_children = skip_all_but_pieces
sys.exit(cli())
