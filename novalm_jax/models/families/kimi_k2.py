"""Kimi K2 (Moonshot AI): the network of DeepSeek-V3 in other sizes. Sources: arXiv:2507.20534 and the model card."""

from dataclasses import replace

from novalm_jax.models.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, model_type="kimi_k2")
