"""The message bus: a protocol and its two implementations."""

from pagewire.shared.bus.protocol import Bus, Handler, Headers, Item, Message, Store, StoredItem, Subscription

__all__ = ["Bus", "Handler", "Headers", "Item", "Message", "Store", "StoredItem", "Subscription"]
