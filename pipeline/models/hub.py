"""Whether the Hugging Face Hub has a model, asked once.

In: a Hub id. Out: nothing, or a `ModelError`. The libraries that load models ask for file after
file and try each again and again, and say what is wrong only after the last.
"""

from __future__ import annotations

from pipeline.errors import ModelError

_TIMEOUT_S = 10.0


def require_on_hub(model_id: str) -> None:
    """Raises ModelError: no such model, or neither a copy in the cache nor a Hub to ask."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(model_id, "config.json"), str):
            return
        HfApi().model_info(model_id, timeout=_TIMEOUT_S)
    except GatedRepoError:
        return  # it is there; whether it may be read is seen when it is
    except (RepositoryNotFoundError, HFValidationError):
        problem = "and no model of that name on the Hugging Face Hub. A private one needs HF_TOKEN"
    except HfHubHTTPError:
        return  # an answer, if not a good one; it may be better next time
    except Exception as error:  # noqa: BLE001 - which errors mean "not reached" is up to the library's own transport
        why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        problem = f"no copy in the cache, and the Hugging Face Hub cannot be reached ({why})"
    else:
        return
    raise ModelError(
        f"model.path = {model_id!r}: there is no such directory here, {problem}. Point it to the directory of a "
        "checkpoint, or to a model on the Hub"
    )
