"""The message bus: a protocol and its two implementations."""

from shared.bus.protocol import Bus, Handler, Headers, Item, Message, Store, Subscription

__all__ = ["Bus", "Handler", "Headers", "Item", "Message", "Store", "Subscription"]
