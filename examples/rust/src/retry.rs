//! Deadlines and retries after the service config beside the protos, which tonic does not read by itself.

use std::future::Future;
use std::time::Duration;

use serde_json::Value;
use tonic::{Code, Request, Response, Status};

use crate::Failure;

/// How the registry's unary calls are made; every status but UNAVAILABLE is final.
pub struct RetryPolicy {
    timeout: Duration,
    attempts_max: u64,
    backoff: Duration,
    backoff_max: Duration,
    multiplier: f64,
}

impl RetryPolicy {
    /// The policy of the first method configuration in the file.
    pub fn from_file(path: &str) -> Result<Self, Failure> {
        let document: Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
        let method = &document["methodConfig"][0];
        let retry = &method["retryPolicy"];
        Ok(Self {
            timeout: duration(&method["timeout"])?,
            attempts_max: retry["maxAttempts"].as_u64().ok_or("no maxAttempts")?,
            backoff: duration(&retry["initialBackoff"])?,
            backoff_max: duration(&retry["maxBackoff"])?,
            multiplier: retry["backoffMultiplier"].as_f64().ok_or("no backoffMultiplier")?,
        })
    }

    /// Calls until there is an answer, a final refusal, or no attempt left.
    pub async fn call<Message, Answer, Call>(
        &self,
        message: Message,
        mut call: impl FnMut(Request<Message>) -> Call,
    ) -> Result<Answer, Status>
    where
        Message: Clone,
        Call: Future<Output = Result<Response<Answer>, Status>>,
    {
        let mut backoff = self.backoff;
        for attempt in 1.. {
            let mut request = Request::new(message.clone());
            request.set_timeout(self.timeout);
            match call(request).await {
                Ok(response) => return Ok(response.into_inner()),
                Err(status) if status.code() == Code::Unavailable && attempt < self.attempts_max => {
                    tokio::time::sleep(backoff.mul_f64(rand::random_range(0.8..1.2))).await;
                    backoff = backoff.mul_f64(self.multiplier).min(self.backoff_max);
                }
                Err(status) => return Err(status),
            }
        }
        unreachable!("the last attempt returns")
    }
}

/// A duration as JSON writes it: "0.1s".
fn duration(value: &Value) -> Result<Duration, Failure> {
    let seconds = value.as_str().and_then(|text| text.strip_suffix('s')).ok_or("no duration")?;
    Ok(Duration::from_secs_f64(seconds.parse()?))
}
