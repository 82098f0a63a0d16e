"""The reference in both roles of a handoff: an engine, a connector and its wire.

``kvview check kvview_reference.handoff.pull:PullConnector --pd`` checks the connector.
"""
