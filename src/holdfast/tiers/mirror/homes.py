"""The two homes of a run, its root and the one behind it, are claimed under one number.

A manifest states the number of its run, and is the same in both homes.  So a run needs a number above all
that either home has seen: then steps of both can be compared, and no name of an attempt is used twice.
"""

from __future__ import annotations

import msgspec

from holdfast.base.errors import UsageError
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.claiming import Claim, greatest_run, release, take_root
from holdfast.core.checkpoint.names import CLAIMED_PARTS, RootKeys
from holdfast.core.checkpoint.tidying import Keep, sweep
from holdfast.core.group import Group
from holdfast.core.store import Store, open_store
from holdfast.live.roots import require_native_root, steps_in


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


def claim_both(
    root: Store, upload: Store, group: Group, best: tuple[str, str] | None
) -> tuple[Claim, bool, str]:
    """Claim two homes, as `roots.claim_root` claims one.  Collective.

    UsageError if either is in use: two runs must not upload to one place, even from different roots.  Files
    that a dead run has begun to upload stay until this run has uploaded a step: they may be of use to it.
    """

    def take_both() -> bytes:
        keys = RootKeys(root, below=CLAIMED_PARTS)
        their_keys = RootKeys(upload, below=CLAIMED_PARTS)
        theirs, held_behind = take_root(upload, their_keys, greatest_run(root, keys), best)
        try:
            mine, held = take_root(root, keys, theirs.run - 1, best)
            if theirs.run != mine.run:
                raise UsageError(
                    f"{root.url} was taken by another run while run {theirs.run} took it",
                    hint="give each run a root of its own",
                )
        except BaseException:
            release(upload, theirs)
            raise
        if held is None or held.is_over():
            with keys:
                sweep(root, mine, 0, keys)
        crashed = any(one is not None and one.started != "closed" for one in (held, held_behind))
        return msgspec.json.encode((mine, crashed, steps_in(keys, their_keys)))

    return decode_json(group.from_rank0(take_both), tuple[Claim, bool, str])
