"""One graph in an ONNX Runtime session: opened, bound and run, with errors that say what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_spec.errors import BundleError, DeviceMemoryError, ProviderError
from edge_spec.runtime.provider import CUDA_PROVIDER

# What ONNX Runtime's arenas, CUDA and its libraries, and C++ say, in lower case. ONNX Runtime has no class for it.
_OUT_OF_MEMORY = (
    "failed to allocate memory",
    "available memory of",
    "is smaller than requested bytes",
    "out of memory",
    "out_of_memory",
    "cudaerrormemoryallocation",
    "alloc_failed",
    "bad_alloc",
    "bad allocation",
)

# What it says where not every node of a graph runs on the GPU.
_NOT_CAPTURED = ("graph capture feature", "cuda graph feature")

# The number under which ONNX Runtime neither captures nor replays.
_EAGER = -1


class GraphSession:
    """A session over one graph.

    Attributes:
        takes_trees: whether the graph takes positions and a mask.
        graphs_refused: why ONNX Runtime captures no calls of this graph, although it was asked to.
    """

    def __init__(
        self,
        onnxruntime: Any,
        path: Path,
        takes_trees: bool,
        providers: Sequence[str],
        threads: int | None = None,
        options: Mapping[str, str] | None = None,
        weights: Mapping[str, Any] | None = None,
        profile: str | None = None,
    ) -> None:
        """Open a graph.

        Args:
            onnxruntime: the imported module.
            path: the graph's file.
            takes_trees: whether it takes positions and a mask.
            providers: execution providers, the one that does the work first.
            threads: CPU threads, ``None`` for ONNX Runtime's choice.
            options: of the CUDA provider, see :func:`edge_spec.runtime.cuda_options.cuda_options`.
            weights: values by name that stand in for initializers of the graph, kept for as long as the session.
            profile: what the name of a profile begins with, see :meth:`end_profile`; ``None`` writes none.

        Raises:
            BundleError: ONNX Runtime refuses the graph.
            DeviceMemoryError: there is no memory for it.
        """

        def named(options: Mapping[str, str] | None) -> list[Any]:
            return [(name, dict(options)) if options and name == CUDA_PROVIDER else name for name in providers]

        self.takes_trees = takes_trees
        self._ort = onnxruntime
        self._weights = dict(weights or {})
        self._graphs = (options or {}).get("enable_cuda_graph") == "1"
        self._run_options: dict[int, Any] = {}
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = threads or 0
        # Attention sees one column more in every call, and a memory pattern would be kept for each number of them.
        settings.enable_mem_pattern = False
        # Target and draft take turns on the same cores: threads that wait for work by spinning would steal them.
        settings.add_session_config_entry("session.force_spinning_stop", "1")
        if profile is not None:
            settings.enable_profiling = True
            settings.profile_file_prefix = profile
        for name, value in self._weights.items():
            settings.add_initializer(name, value)
        self.graphs_refused: str | None = None
        try:
            try:
                self.session = onnxruntime.InferenceSession(str(path), settings, providers=named(options))
            except Exception as error:
                if not self._graphs or not any(sign in said(error).lower() for sign in _NOT_CAPTURED):
                    raise
                # Not all nodes run on the GPU here, so calls cannot be captured, but the rest still works.
                self.graphs_refused, self._graphs = said(error), False
                eager = {**(options or {}), "enable_cuda_graph": "0"}
                self.session = onnxruntime.InferenceSession(str(path), settings, providers=named(eager))
        except Exception as error:  # ONNX Runtime raises classes of its own that share no base below Exception
            if is_out_of_memory(error):
                raise DeviceMemoryError(
                    f"There is no memory on the device for {path} ({said(error)}). Free some, or load with a smaller "
                    "context or a smaller budget."
                ) from error
            raise BundleError(f"ONNX Runtime cannot load {path}: {said(error)}") from error

    def binding(self) -> Any:
        """A fresh binding of the session."""
        return self.session.io_binding()

    def run(self, binding: Any, graph: int | None = None) -> None:
        """Run what is bound.

        Args:
            binding: of this session.
            graph: number of the CUDA graph that is captured in the first such run, and replayed in later ones of the
                same thread; ``None`` runs without.

        Raises:
            Exception: whatever ONNX Runtime raises.
        """
        if graph is None and not self._graphs:
            self.session.run_with_iobinding(binding)
            return
        number = _EAGER if graph is None else graph
        options = self._run_options.get(number)
        if options is None:
            options = self._run_options[number] = self._ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(number))
        self.session.run_with_iobinding(binding, options)

    def end_profile(self) -> Path:
        """End the profile, and return its file."""
        return Path(self.session.end_profiling())


def call_failure(error: Exception, rows: int, cached: int) -> ProviderError:
    """The error of a call that ONNX Runtime did not finish."""
    call = f"a call with {rows} rows behind {cached} cached tokens"
    if is_out_of_memory(error):
        return DeviceMemoryError(
            f"There was no memory for {call}: {said(error)}. Nothing of it counts; load with a smaller budget or "
            "context, so that the plan leaves room for what else runs on the device."
        )
    return ProviderError(f"ONNX Runtime failed in {call}: {said(error)}. Nothing of it counts; the engine can go on.")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that ONNX Runtime failed because memory was short."""
    text = str(error).lower()
    return any(sign in text for sign in _OUT_OF_MEMORY)


def said(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())
