"""The model hub: whether it can be asked, and a model folder with its card as a repository of it.

Its own library tries for half a minute before it says that it cannot be reached.
"""

from __future__ import annotations

import fnmatch
import http.client
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TRUE = ("1", "ON", "YES", "TRUE")  # what the hub's library takes for it
_SECONDS = 10.0  # as long as the hub's library waits for a first answer


def why_unreachable() -> str:
    """Why the hub cannot be asked, in words; empty where it answers, whatever it answers."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in _TRUE:
            return f"{name} is set"
    if any(address.startswith("socks") for address in urllib.request.getproxies().values()):
        return ""  # a proxy that the standard library does not speak: the hub's library will see
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_SECONDS)
    except (urllib.error.HTTPError, http.client.HTTPException):
        return ""
    except OSError as error:
        reason = getattr(error, "reason", error)
        answered = isinstance(reason, ssl.SSLError)  # by someone; the hub's library judges by whom
        return "" if answered else f"{address} does not answer: {reason}"
    return ""


_REPOSITORY = re.compile(r"[\w][\w.-]{0,95}/[\w][\w.-]{0,95}")
# What a model is made of, for transformers and peft.
_FILES = (
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "adapter_config.json",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What goes to the hub: files of a folder, and texts in place of others, by their names."""

    repo: str
    files: tuple[Path, ...]
    texts: Mapping[str, str]
    left_out: tuple[str, ...] = ()

    def sizes(self) -> dict[str, int]:
        """Every file by name, with its bytes."""
        files = {file.name: file.stat().st_size for file in self.files}
        return files | {name: len(text.encode()) for name, text in self.texts.items()}


def plan_upload(folder: Path, repo: str, *, texts: Mapping[str, str]) -> Upload:
    """The files of a model folder that belong to the model; links and folders never do."""
    if not _REPOSITORY.fullmatch(repo):
        raise ValueError(f"push: {repo!r} is not a repository name; write ORG/NAME or USER/NAME")
    files: list[Path] = []
    left_out: list[str] = []
    for path in sorted(folder.iterdir()):
        plain = path.is_file() and not path.is_symlink()
        if path.name in texts:
            continue
        if plain and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _FILES):
            files.append(path)
        else:
            left_out.append(path.name)
    return Upload(repo=repo, files=tuple(files), texts=texts, left_out=tuple(left_out))


def upload(plan: Upload, *, private: bool, update: bool) -> str:
    """Make the repository and commit the files; returns its address.

    A repository that is there already is left alone, unless ``update`` asks for another commit.
    """
    if why := why_unreachable():
        raise ValueError(f"push: the hub cannot be reached ({why}); nothing was uploaded")
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    contents: dict[str, Path | bytes] = {file.name: file for file in plan.files}
    contents |= {name: text.encode() for name, text in plan.texts.items()}
    operations = [
        hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=given)
        for name, given in contents.items()
    ]
    try:
        made = api.create_repo(plan.repo, private=private, exist_ok=update)
        api.create_commit(plan.repo, operations, commit_message="Upload a model by posttrain")
    except LocalTokenNotFoundError:
        raise ValueError(_no_token("there is no token of the hub here")) from None
    except HfHubHTTPError as error:
        raise ValueError(_why(error, plan.repo)) from None
    except (RuntimeError, OSError) as error:  # what it raises where an upload breaks off
        raise ValueError(
            f"push: the upload to {plan.repo!r} broke off: {error.__cause__ or error}; nothing was "
            "committed; try it again with --update"
        ) from error
    return str(made)


def _no_token(why: str) -> str:
    return (
        f"push: {why}; make one with the right to write (huggingface.co/settings/tokens) and give "
        "it by hf auth login, or in the variable HF_TOKEN"
    )


def _why(error: Exception, repo: str) -> str:
    code = getattr(getattr(error, "response", None), "status_code", None)
    if code == 401:
        return _no_token("the hub does not know the token, or there is none")
    if code == 403:
        return f"push: the token may not write to {repo!r}; take one that may, or your own name"
    if code == 409:
        return (
            f"push: {repo!r} is there already, and nothing was uploaded; add a commit to it with "
            "--update, or choose another name"
        )
    said = " ".join(str(error).split())[:300]
    return f"push: the hub refused {repo!r} ({code or type(error).__name__}): {said}"
