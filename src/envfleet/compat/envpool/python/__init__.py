"""EnvPool's package of its Python side, as far as scripts import it."""
