"""Tokenizers: conversion of text to token ids and back. Torch-free."""
