"""Hugging Face models: importing this registers attention and its masks as "lagwise".

    import lagwise.hf
    model = AutoModel.from_pretrained(name, attn_implementation="lagwise")         # or model.set_attn_implementation("lagwise")

T5, mT5, UMT5, what is made of their classes, and MPNet compute their bias lag by lag; other models on the attention interface get
plain attention with their own masks. BERTs with relative positions come by `from_pretrained_relative`, and `convert` gives
relative positions to models that have none.
"""

from lagwise.hf import interface, mpnet, t5
from lagwise.hf.bert import from_pretrained_relative, restore_relative
from lagwise.hf.conversion import FadeCallback, convert, fade, redraw
from lagwise.hf.conversion import install as install_converted
from lagwise.hf.first_steps import warmup
from lagwise.hf.masks import NAME, Mask

__all__ = ["NAME", "FadeCallback", "Mask", "convert", "fade", "from_pretrained_relative", "redraw", "restore_relative", "warmup"]

interface.install()
t5.install()
mpnet.install()
install_converted()
