"""Demo: conversion of a shipped model, loaded and measured by stock transformers."""
