"""Tests of the built wheel in an empty environment: `make test-wheel`."""
