"""Errors of the library, said in the language of the command line."""

from __future__ import annotations

import meteor_py
from meteor_cli.render.sanitize import sanitize


def explain(error: Exception) -> str:
    """One sentence, and a hint that names commands in place of methods."""
    match error:
        case meteor_py.StreamNotFound():
            return (
                f"There is no stream {error.stream!r}; `meteor streams ls` shows those there are, "
                f"and `meteor streams create {error.stream}` makes it."
            )
        case meteor_py.GroupNotFound():
            return (
                f"Stream {error.stream!r} has no group {error.group!r}; `meteor groups ls "
                f"{error.stream}` shows those it has."
            )
        case meteor_py.PeerGroupNotFound():
            return (
                f"There is no peer group {error.group!r}; `meteor peers ls` shows those there are."
            )
        case meteor_py.MemberUnknown() if error.member:
            return (
                f"There is no member {error.member!r} in group {error.group!r}; `meteor peers "
                f"members {error.group}` shows who is."
            )
        case meteor_py.PeerError() if "force=True" in str(error):
            return str(error).replace("force=True", "--force")
        case meteor_py.GroupActive() if str(error).startswith("Shared "):
            return (
                f"Shared group {error.group!r} of stream {error.stream!r} is active: "
                f"{sanitize(error.owner)} is one of its consumers. Stop them first, or delete it "
                "all the same with --force; they will be told."
            )
        case meteor_py.GroupActive():
            return (
                f"Group {error.group!r} of stream {error.stream!r} is active: "
                f"{sanitize(error.owner)} has its lease. Stop that member first, or take the group "
                "from it with --force."
            )
        case meteor_py.StreamConfigMismatch():
            return str(error).replace(
                "stream.configure()", f"`meteor streams configure {error.stream}`"
            )
        case meteor_py.StoreMismatch():
            return (
                str(error)
                .replace(
                    "give one when you create it: client.stream(name, store=...)",
                    "give one when you create it: `meteor streams create NAME --store DIR`",
                )
                .replace(
                    "open the stream with client.stream(name, store=...)",
                    "`meteor archive` takes the address with --store",
                )
            )
        case meteor_py.StreamFull() | meteor_py.StoreUnavailable():
            return (
                str(error)
                .replace(
                    "Is an archiver running?", f"Start one: `meteor archive run {error.stream}`."
                )
                .replace("Does an archiver run,", "Does `meteor archive run` run somewhere,")
            )
        case meteor_py.LogTruncated() if error.last < error.first:
            return (
                f"Stream {error.stream!r} was deleted and created anew, or the server has lost "
                "records of it; what is there now may be other records. Start again."
            )
        case meteor_py.LogTruncated():
            return (
                f"The server has lost records {error.first} to {error.last} of stream "
                f"{error.stream!r}, or the stream was created anew; what is there now may be other "
                "records. Start again to read them."
            )
        case meteor_py.RecordsLost() | meteor_py.SegmentCorrupt():
            lost = isinstance(error, meteor_py.RecordsLost)
            return (
                f"Records {error.first} to {error.last} of stream {error.stream!r} are "
                f"{'gone' if lost else 'damaged in the store'}; start at {error.last + 1}, with "
                f"`-o {error.last + 1}`."
            )
        case meteor_py.RecordTooLarge():
            return str(error).replace("raise max_record_bytes", "allow for it with --max-bytes")
        case OSError() if error.strerror and not error.filename:  # as of a full disk
            return f"{error.strerror}."
        case meteor_py.MeteorError() | ValueError() | ImportError() | TimeoutError() | OSError():
            return str(error)
    return (
        f"Something unexpected went wrong: {type(error).__name__}: {error} (--debug shows where)."
    )
