"""Ray Train Lab: an executable textbook whose every statement is measured."""

__version__ = "0.1.0"
