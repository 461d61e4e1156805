"""What the architecture of posttrain allows: to change the architecture, change a table here."""

MAX_FILE_LINES = 400  # most are under 300: one idea that needs more is better whole
MAX_FUNCTION_LINES = 60  # without the docstring: equations and examples are welcome
MAX_POSITIONAL = 2  # beyond self
MAX_FAN_OUT = 15  # modules of ours that one module imports, lazily or not
MAX_MODULES = 20  # in a package; a package inside it counts for itself

# The core is all but these: tools, and what has a plain twin that computes the same; no result
# depends on them.
NOT_CORE = {"fast", "sandbox", "walkthrough", "viewer", "serving", "distributed"}
# The design asks for 22,000 after the rebuild, and for 26,000 with environments, adapters and the
# wider interface. This is what there is: lower it with every thousand that goes, never raise it
# but for a new capability.
MAX_CORE_LINES = 59_750

# A module has a name of its own; Python gives these, and a stage's file is named by its stage. The
# sandbox is copied to where untrusted code runs: its files are no one else's.
MAY_SHARE_NAME = {"__init__", "__main__"}
NAMED_BY_STAGE = {"stages.reward", "stages.rl", "sandbox.wire", "sandbox.worker"}

# Lower never imports higher, and packages of the same layer never import each other.
LAYERS = [
    ["types", "registry", "disk", "written", "forked", "cpu_threads", "options", "sandbox"],
    ["protocols", "algorithms", "model_paths"],
    ["data", "rewards", "tasks", "envs", "models", "track"],
    ["fast"],  # stands on models, which do without it
    ["rollout", "learn", "runs", "report", "walkthrough"],
    ["pipelines"],
    ["config", "build", "check", "estimate", "stages", "distributed"],
    ["api", "research", "viewer", "serving", "cli"],
    ["__main__"],
]

# These see less than everything below them.
MAY_ONLY_IMPORT = {
    "fast": {"types", "cpu_threads", "protocols", "algorithms", "models"},
    "pipelines": {"types", "protocols", "algorithms", "data"},
    "cli": {
        "config",
        "build",
        "check",
        "estimate",
        "stages",
        "distributed",
        "runs",
        "report",
        "viewer",
        "serving",
    },
}

# What a package is entered by: nobody outside imports another module of it.
# Through the third, a plan asks what a pass will keep, and nothing runs.
DOORS = {"fast": {"score", "decode", "pass_memory"}}

# An implementation that only its own package and the composition root name: others, its protocol.
NAMED_ONLY_IN = {"LocalLearner": {"learn", "build"}}

# (importer, imported) that the layers alone would forbid, and why they are right.
EXTRA_EDGES = {
    ("tasks", "rewards"),  # a task names its default rewards
    ("tasks", "envs"),  # a task of a game plays it for its demonstrations
    ("tasks", "data"),  # a task of a file reads its rows
    ("report", "runs"),  # what came out of a run is read from its folder
    ("build", "config"),  # the composition root turns a recipe into parts
    ("distributed", "config"),  # a rank builds its learner as one process does
    ("distributed", "build"),
    ("distributed", "check"),  # a plan measures as a check does
    ("stages", "distributed"),  # a run connects to the cluster that its recipe names
    ("check", "config"),  # it looks at what a recipe asks for
    ("check", "build"),  # it makes the parts as a run does
    ("estimate", "config"),  # a plan asks what a recipe would take
    ("estimate", "build"),  # by the rules with which it is built
    ("stages", "config"),  # each takes its section
    ("stages", "build"),  # they are handed the parts
    ("stages", "check"),  # a run looks before it trains
    ("cli", "model_paths"),  # a mistyped folder is told before anything is loaded
    ("cli", "serving"),  # `posttrain serve`
    ("cli", "viewer"),  # `posttrain view` opens the page
    ("cli", "walkthrough"),  # `posttrain walkthrough` and `posttrain explain` need no config
    ("cli", "algorithms"),
    ("cli", "track"),  # who waits for a library to load reads so
}

STANDARD_AND_TORCH_ONLY = {
    "",
    "types",
    "registry",
    "disk",
    "written",
    "cpu_threads",
    "forked",
    "model_paths",
    "options",
    "protocols",
    "algorithms",
}  # "" is the root
STANDARD_ONLY = {"sandbox"}  # it is copied, file by file, to where untrusted code runs

# Where each third party may be imported: a package, or one module. Torch and numpy are not listed.
CONFINED = {
    "bitsandbytes": ["learn.optim", "models.quantized"],
    "click": ["cli"],
    "datasets": ["data.hub_rows"],
    "fastapi": ["viewer.server", "serving.http_server"],
    "gguf": ["models"],
    "gymnasium": ["envs.adapters.gymnasium_text"],
    "huggingface_hub": ["models.files.hub"],
    "matplotlib": ["walkthrough", "report.plot"],
    "mcp": ["envs.adapters.mcp_tools"],
    "mpmath": ["rewards.math.evaluator"],
    "openenv": ["envs.adapters.openenv"],
    "pandas": ["data.row_objects"],
    "pyarrow": ["data", "runs"],
    "pydantic": ["config"],
    "ray": ["distributed"],
    "re2": ["rewards.format"],
    "reasoning_gym": ["tasks"],
    "rich": ["walkthrough", "track", "report.terminal", "check", "stages", "cli"],
    "safetensors": ["models", "learn", "rollout.engines.vllm_worker"],
    "tensorboard": ["track.tensorboard"],
    "tokenizers": ["data", "models"],
    "torch.utils.tensorboard": ["track.tensorboard"],
    "transformers": [
        "models",
        "fast",
        "data.template",
        "data.control_tokens",
        "data.token_texts",
        "data.chat_worker",
        "rollout.engines.transformers",
    ],
    "triton": ["fast.kernels"],
    "typer": ["cli"],
    "uvicorn": ["viewer.server", "serving.http_server"],
    "verifiers": ["envs.adapters.verifiers_env"],
    "vllm": ["rollout.engines.vllm_worker"],
    "wandb": ["track.wandb"],
    "yaml": ["config.peers"],
}

PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
KERNEL = "triton.jit"  # Triton knows positional parameters alone, and only our launchers call it
SIGNATURE_FIXED_BY_PYTHON = {"__exit__", "__aexit__", "__torch_dispatch__"}  # and by PyTorch
# The positional parameters of a reward are the data it wants, and are always passed by name.
SIGNATURE_IS_DATA = {"judge_verdict", "code_tests"}
# Query, key and value: the order in which everyone gives them. transformers calls the last.
ATTENTION = {
    "attend",
    "decode_attention",
    "plain_decode_attention",
    "replaced_attention",
}

# Facts about a piece are asked of the piece: these alone know pieces by their names.
# config.peers says what other libraries call them.
MAY_NAME_PIECES = [
    "algorithms",
    "config.data_stages",
    "config.peers",
    "config.reference",
    "options",  # written from the sections
    "walkthrough",
]
# A stage that has the name of the best known of its losses.
PIECES_AND_STAGES = {"dpo"}
# Where a word that is also the name of a piece means something else.
OTHER_MEANINGS = {
    "envs.tool_schemas": {"return"},
    "pipelines.metrics": {"return", "truncated"},
    "rewards.math.units": {"squared"},
    "rewards.math.words": {"squared"},
    "track.shown": {"clipped"},
    "types.batch": {"truncated"},
}
