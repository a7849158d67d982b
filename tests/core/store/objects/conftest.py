"""Servers of object stores, for the tests of this folder."""

from core.store.objects.fixtures import azurite, credentials, google, moto, proxy, s3rver, seaweed

__all__ = ["azurite", "credentials", "google", "moto", "proxy", "s3rver", "seaweed"]
