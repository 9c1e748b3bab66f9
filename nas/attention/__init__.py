"""Causal attention with entropy; `nas.attention.causal` chooses the fastest implementation available."""
