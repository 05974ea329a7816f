"""What can go wrong between here and the Hugging Face hub, and what to do about it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from edge_spec.errors import CheckpointError, EdgeSpecError
from edge_spec.export.hub_name import HubName

_AGAIN = "run the command again; files that are complete are kept"


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Turn what the hub's client raises into an error that says what to do.

    Raises:
        CheckpointError: instead of any other error.
        KeyboardInterrupt: with a message, where the user did it.
    """
    from huggingface_hub import constants, errors

    try:
        yield
    except EdgeSpecError:
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Fetching {str(name)!r} was interrupted; to go on, {_AGAIN}.") from None
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name.repository!r} is gated: accept its terms on {constants.ENDPOINT}/{name.repository}, then log in "
            "with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"no checkpoint {str(name)!r}: it is neither a local path nor a public model on the Hugging Face hub; "
            "check the spelling, or log in with `hf auth login` if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name.repository!r} has no revision {name.revision!r}; its branches and tags are listed on "
            f"{constants.ENDPOINT}/{name.repository}/tree/main"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if error.__cause__ is None or isinstance(error.__cause__, errors.OfflineModeIsEnabled):
            raise CheckpointError(
                f"no checkpoint {str(name)!r}: it is neither a local path nor in the local cache, and with --offline "
                "or HF_HUB_OFFLINE the Hugging Face hub is not asked; fetch it once with a network, or give a local "
                "folder or .gguf file"
            ) from error
        raise _unreachable(name, error.__cause__) from error
    except errors.EntryNotFoundError as error:
        raise CheckpointError(f"{name.repository!r} was changed while it was fetched ({error}); {_AGAIN}") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{str(name)!r} is no name on the hub: {error}") from error
    except errors.HfHubHTTPError as error:
        raise _refused(name, error, getattr(error.response, "status_code", 0)) from error
    except OSError as error:
        if error.errno is None:  # a network's
            raise _unreachable(name, error) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"the disk is full where the hub's cache is, {constants.HF_HUB_CACHE}; free some space, or have the "
                f"cache elsewhere with HF_HOME, and {_AGAIN}"
            ) from error
        raise CheckpointError(
            f"cannot write {error.filename or constants.HF_HUB_CACHE}: {error.strerror}; the hub's cache has to be "
            "writable, or elsewhere with HF_HOME"
        ) from error
    except Exception as error:  # of the packages that the client talks through
        raise _unreachable(name, error) from error


def _unreachable(name: HubName, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"no checkpoint {str(name)!r} is at a local path, and the Hugging Face hub cannot be reached "
        f"({type(error).__name__}: {error}); check the network and {_AGAIN}, use what is in the cache with --offline, "
        "or give a local folder or .gguf file"
    )


def _refused(name: HubName, error: Exception, status: int) -> CheckpointError:
    what = f"the Hugging Face hub does not give out {str(name)!r}"
    if status == 401:
        return CheckpointError(f"{what}: it refuses the token; log in with `hf auth login`, or unset HF_TOKEN")
    if status == 403:
        return CheckpointError(f"{what}: the token may not read it; ask for access on the hub, or use another token")
    if status == 429:
        return CheckpointError(f"{what}: too many requests; wait some minutes, or log in with `hf auth login`")
    if status >= 500:
        return CheckpointError(f"{what} now (HTTP {status}); try again later, or use what is in the cache, --offline")
    return CheckpointError(f"{what}: {error}")
