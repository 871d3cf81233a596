"""Examples and measurements, on the public interface of qjax only."""
