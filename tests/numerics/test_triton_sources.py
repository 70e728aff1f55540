"""What kernels in Triton and Gluon must not say, because versions of Triton read it differently."""

import ast
from pathlib import Path

import isograd

SOURCES = Path(isograd.__file__).parent


def negative_zeros(text: str) -> list[int]:
    """Lines with a literal -0.0."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
        and node.operand.value == 0
    ]


def test_negative_zero_is_computed() -> None:
    """Triton 3.6 makes 0.0 of a literal -0.0 where 3.8 keeps the sign."""
    assert negative_zeros("x = 1\ny = -0.0") == [2]
    kernels = {path: path.read_text() for path in SOURCES.rglob("*.py")}
    kernels = {path: text for path, text in kernels.items() if "@triton.jit" in text or "@gluon.jit" in text}
    assert kernels
    assert {str(path): lines for path, text in kernels.items() if (lines := negative_zeros(text))} == {}
