"""Whether the model hub can be asked: its own library tries for half a minute before it says."""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.error
import urllib.request

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
