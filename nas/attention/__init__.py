"""Causal attention with entropy; `nas.attention.causal` picks the fastest way at hand."""
