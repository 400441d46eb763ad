"""The C++ core: `core` is what native/bind compiles to, FOLDER holds the other compiled files.

Write `from envfleet._native import core`: import-linter sees no compiled module, and takes
`from envfleet._native.core import ...` for an import of the root package.
"""

from pathlib import Path

from envfleet._native import core

# Has include/ for envs that are compiled apart, and the libraries of the envs on MuJoCo and Box2D. In an editable
# install it is not the folder of this file.
FOLDER = Path(str(core.__file__)).parent
