"""The fake meter, by the name the tests know it by."""

from flex_trainer.testing.fake_meter import BASE_BYTES, FakeMeter, with_fake_meter

__all__ = ["BASE_BYTES", "FakeMeter", "with_fake_meter"]
