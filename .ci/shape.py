"""The shape of the house, printed by `make check`: code lines and files of each room, and of a plain run.

A code line is neither blank, nor a comment, nor of a docstring.  Nothing here fails: it is to be looked at.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

SRC = Path(__file__).parent.parent / "src"
PLAIN_RUN = """
import sys, tempfile
import torch, holdfast
with holdfast.Checkpointer(tempfile.mkdtemp(), {"w": torch.zeros(2)}) as ckpt:
    ckpt.save(1).wait()
print(*(m.__file__ for n, m in list(sys.modules.items()) if n.split(".")[0] == "holdfast"), sep="\\n")
"""
LEFT_OUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def code_lines(path: Path) -> int:
    """Number of code lines of a file."""
    text = path.read_text()
    told = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LEFT_OUT and token.type != tokenize.ENDMARKER
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - told)


def main() -> None:
    house = SRC / "holdfast"
    rooms = sorted(p for p in house.iterdir() if p.is_dir() and p.name != "__pycache__")
    lines = {path: code_lines(path) for path in house.rglob("*.py")}
    print(f"{'room':14}{'files':>7}{'code lines':>12}")
    for room in rooms:
        own = {path: n for path, n in lines.items() if room in path.parents}
        print(f"{room.name:14}{len(own):7}{sum(own.values()):12,}")
    print(f"{'all':14}{len(lines):7}{sum(lines.values()):12,}")
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_RUN], capture_output=True, text=True, check=True
    )
    loaded = {Path(line) for line in done.stdout.split()} & lines.keys()
    print(f"{'a plain run':14}{len(loaded):7}{sum(lines[path] for path in loaded):12,}")


if __name__ == "__main__":
    main()
