"""Defaults that the description of a flag states in words are those of the code."""

import re

import pytest

from costmodel.network import DEFAULT_NETWORK
