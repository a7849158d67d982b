"""The two homes of a run: its root, and the one behind it."""

from __future__ import annotations

from holdfast.base.errors import UsageError
from holdfast.core.checkpoint.tidying import Keep
from holdfast.core.store import open_store
from holdfast.live.roots import require_native_root


def check_homes(root: str, upload: str | None, upload_keep: Keep | None) -> None:
    """UsageError unless `upload` is another place than the root."""
    if upload is None:
        if upload_keep is not None:
            raise UsageError(
                "upload_keep= says which steps stay behind the root: give upload=, too"
            )
        return
    require_native_root(upload)
    (one, _, at), (other, _, other_at) = (open_store(p).url.partition("?") for p in (root, upload))
    one, other = (f"{url.rstrip('/')}/" for url in (one, other))
    if at == other_at and (one.startswith(other) or other.startswith(one)):
        raise UsageError(
            f"upload={upload} lies in the root {root}, or that in it: the home behind must be apart",
            hint="give upload= a place of its own, as a bucket, or a folder on another disk",
        )
