"""Tests of model/system."""
