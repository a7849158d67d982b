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
                "upload_keep= says which steps stay in the home behind the root: give upload=, too"
            )
        return
    require_native_root(upload)
    urls = (open_store(path).url.partition("?") for path in (root, upload))
    (one, _, options), (other, _, other_options) = urls
    one, other = (f"{url.rstrip('/')}/" for url in (one, other))
    if options == other_options and (one.startswith(other) or other.startswith(one)):
        raise UsageError(
            f"upload={upload} and the root {root} lie one inside the other, or are the same",
            hint="give upload= a place of its own, such as a bucket, or a folder on another disk",
        )
