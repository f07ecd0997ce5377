"""``attn_implementation="foundry"`` after ``import foundry_kernels``: the package registers its attention as soon as
transformers has the module that knows attention by name, in either order of imports. transformers is not imported."""

from __future__ import annotations

from foundry_kernels.integrations.release import check_release


def register() -> None:
    """Registers the names of :mod:`foundry_kernels.integrations.attention.functions`. A transformers that is too old
    goes without them: it is imported right now, by a program that may not want them."""
    try:
        check_release()
    except ImportError:
        return
    # The statement, unlike `import_module`, waits for another thread that is at the same import and waits for this one.
    import foundry_kernels.integrations.attention.functions  # noqa: F401
